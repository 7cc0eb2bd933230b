"""Bits per byte on held-out standard-library files, beside gzip and xz on the same bytes.

The model reads each file on its own, from `[BOS]`; the compressors read all files as one stream.
Legend: T tokens of a file.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3_core.evaluate import stdlib
from k3_core.evaluate.losses import document_losses

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer


@dataclass(frozen=True)
class TextScore:
    """Bits per byte of the model and of two compressors on the same bytes."""

    num_files: int
    num_bytes: int
    num_tokens: int
    bits_per_byte: float
    gzip_9: float
    xz: float


def heldout_texts(max_bytes: int | None = None) -> list[str]:
    """Held-out files in the order of a hash of their paths, until there are `max_bytes` bytes."""
    named = sorted(
        stdlib.heldout_files(), key=lambda item: hashlib.blake2b(item[0].encode()).digest()
    )
    texts: list[str] = []
    total = 0
    for _, text in named:
        if max_bytes is not None and total >= max_bytes:
            break
        texts.append(text)
        total += len(text.encode())
    return texts


def score_texts(
    model: K3ForConditionalGeneration,
    tokenizer: K3Tokenizer,
    texts: list[str],
    *,
    window: int = 2048,
    tokens_per_forward: int = 16_384,
) -> TextScore:
    """Score every token of every text once, in the windows of `document_losses`."""
    documents = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    losses = document_losses(model, documents, window=window, tokens_per_forward=tokens_per_forward)
    nats = sum(float(losses_T.sum()) for losses_T in losses)
    data = "".join(texts).encode()
    return TextScore(
        num_files=len(texts),
        num_bytes=len(data),
        num_tokens=sum(map(len, losses)),
        bits_per_byte=nats / math.log(2) / len(data),
        gzip_9=8 * len(_gzip(data)) / len(data),
        xz=8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
    )


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: gzip header, as `gzip -9` writes
    return packer.compress(data) + packer.flush()
