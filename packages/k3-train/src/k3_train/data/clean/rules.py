"""Rule filters on the text alone."""

import zlib

from k3_train.data.clean.settings import CleanSettings

MIN_COMPRESSED_CHARS = 2048


def broken_rule(text: str, settings: CleanSettings) -> str | None:
    """The name of the first rule that the text breaks, None for a text that passes."""
    if len(text) < settings.min_chars:
        return "too_short"
    if len(text) > settings.max_chars:
        return "too_long"
    if max(map(len, text.splitlines()), default=0) > settings.max_line_chars:
        return "long_line"
    if letters(text) < settings.min_letters:
        return "few_letters"
    if repeated_lines(text) > settings.max_repeated_lines:
        return "repeated_lines"
    if len(text) > MIN_COMPRESSED_CHARS and entropy(text) < settings.min_entropy:
        return "low_entropy"
    return None


def letters(text: str) -> float:
    """Share of letters and digits among the characters that are not white space."""
    visible = "".join(text.split())
    return sum(map(str.isalnum, visible)) / max(len(visible), 1)


def repeated_lines(text: str) -> float:
    """Share of the characters in lines that stood in the text before."""
    seen: set[str] = set()
    repeated = total = 0
    for line in map(str.strip, text.splitlines()):
        total += len(line)
        repeated += len(line) if line in seen else 0
        seen.add(line)
    return repeated / max(total, 1)


def entropy(text: str) -> float:
    """Compressed bytes over bytes."""
    data = text.encode("utf-8", "replace")
    return len(zlib.compress(data, 1)) / len(data)
