"""Bits per byte on held-out standard-library files, beside gzip and xz on the same bytes.

The model reads each file on its own, from `[BOS]`; the compressors read all files as one stream.
Legend: T packed tokens of several windows.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3_core.evaluate import stdlib
from k3_core.model.batch import SequenceBatch

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

IGNORE_INDEX = -100


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


@torch.inference_mode()
def score_texts(
    model: K3ForConditionalGeneration,
    tokenizer: K3Tokenizer,
    texts: list[str],
    *,
    window: int = 2048,
    tokens_per_forward: int = 16_384,
) -> TextScore:
    """Score every token of every text once, given at least `window // 4` tokens before it.

    (Fewer at the start of a text.) Windows are `window` tokens long and overlap by a quarter.
    """
    nats, num_tokens = 0.0, 0
    documents = [tokenizer.encode(text) for text in texts]
    windows = (w for ids in documents for w in _windows([tokenizer.bos_id, *ids], window))
    for group in _grouped(windows, tokens_per_forward):
        lengths = [len(inputs) for inputs, _ in group]
        ids_T, labels_T = (
            torch.tensor([i for one in group for i in one[part]], device=model.device)
            for part in (0, 1)
        )
        batch = SequenceBatch.from_lengths(lengths, device=model.device)
        hidden_TD = model.forward_packed(ids_T, batch, output_logits=False).hidden_TD
        loss = model.ops.linear_cross_entropy(
            hidden_TD,
            model.language_model.lm_head.weight,
            labels_T,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        nats += float(loss)
        num_tokens += int((labels_T != IGNORE_INDEX).sum())
    data = "".join(texts).encode()
    return TextScore(
        num_files=len(texts),
        num_bytes=len(data),
        num_tokens=num_tokens,
        bits_per_byte=nats / math.log(2) / len(data),
        gzip_9=8 * len(_gzip(data)) / len(data),
        xz=8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
    )


def _windows(ids: list[int], window: int) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, labels) whose labels other than IGNORE_INDEX are ids[1:], each once."""
    scored = 0  # ids[: scored + 1] need no more score
    while scored < len(ids) - 1:
        start = max(0, scored - window // 4)
        stop = min(start + window, len(ids) - 1)
        yield ids[start:stop], [IGNORE_INDEX] * (scored - start) + ids[scored + 1 : stop + 1]
        scored = stop


def _grouped(
    windows: Iterable[tuple[list[int], list[int]]], num_tokens: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    group: list[tuple[list[int], list[int]]] = []
    total = 0
    for one in windows:
        if group and total + len(one[0]) > num_tokens:
            yield group
            group, total = [], 0
        group.append(one)
        total += len(one[0])
    if group:
        yield group


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: gzip header, as `gzip -9` writes
    return packer.compress(data) + packer.flush()
