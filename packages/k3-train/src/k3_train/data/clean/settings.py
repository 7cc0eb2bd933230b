"""The settings of a cleaning: which rules are on, and their thresholds (all our own choice)."""

from dataclasses import dataclass

from k3_core.config import ConfigError


@dataclass(frozen=True)
class CleanSettings:
    """Each rule by its name; a rule that is off keeps what it would have dropped.

    min_chars, max_chars: of a document. max_line_chars: of its longest line (minified code).
    min_letters: share of letters and digits among its visible characters. max_repeated_lines:
    share of the characters that stand in lines seen before in the document. min_entropy:
    compressed bytes over bytes of documents above 2 kB. near_jaccard: word sets at least so much
    alike are duplicates. min_quality: score of the classifier, when there is one. seed: of MinHash.
    """

    exact: bool = True
    binary: bool = True
    log: bool = True
    truncated: bool = True
    structure: bool = True
    near: bool = True
    min_chars: int = 32
    max_chars: int = 20_000_000
    max_line_chars: int = 10_000
    min_letters: float = 0.35
    max_repeated_lines: float = 0.5
    min_entropy: float = 0.05
    near_jaccard: float = 0.8
    min_quality: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("min_letters", "max_repeated_lines", "min_entropy", "min_quality"):
            _check(name, getattr(self, name), 0, 1)
        _check("near_jaccard", self.near_jaccard, 0.5, 1)
        _check("min_chars", self.min_chars, 0, self.max_chars)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(name, f"{value} is out of range", f"Give between {low} and {high}.")
