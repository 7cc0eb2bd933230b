"""Reading and writing rank files: one `base64(token) rank` a line (tiktoken's format)."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from k3_core.errors import K3Error


class TokenizerError(K3Error, ValueError):
    """A rank file, a folder or an id that is not of this tokenizer."""


def read_ranks(path: Path, num_base_tokens: int) -> dict[bytes, int]:
    """Token bytes -> rank, in the order of the file. Ranks may have gaps.

    Raises TokenizerError for a line that is not `base64 rank`, a token or rank given twice, a rank
    outside 0..num_base_tokens-1, and a file without all 256 single bytes (byte pair encoding
    could not represent every text).
    """
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        if not line:
            continue
        token, rank = _read_line(line, f"{path}, line {number}")
        if not 0 <= rank < num_base_tokens:
            raise TokenizerError(
                f"{path}, line {number}: rank {rank} is not in 0..{num_base_tokens - 1}; "
                f"pass the num_base_tokens that the file was made for"
            )
        if token in ranks or rank in seen:
            raise TokenizerError(
                f"{path}, line {number}: token {token!r} or rank {rank} came before"
            )
        ranks[token] = rank
        seen.add(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path} lacks {len(missing)} of the 256 single bytes, first {missing[0]:#04x}; "
            f"a rank file needs them all"
        )
    return ranks


def read_file(path: Path) -> bytes:
    """The bytes of a tokenizer's file. Raises TokenizerError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{path}: {error.strerror}; a folder with a tokenizer holds tiktoken.model and "
            f"tokenizer_config.json"
        ) from None


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write the ranks in increasing order, each line ended by a newline."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for t, rank in ordered))


def _read_line(line: bytes, where: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"{where}: {line[:80]!r} is not `base64 rank` ({error})") from None
