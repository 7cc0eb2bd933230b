"""The loss of every token of documents of any length, in windows that overlap.

Each document is read on its own. Legend: T packed tokens of several windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from k3_core.model.batch import SequenceBatch

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration

IGNORE_INDEX = -100
T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """A piece of one document. labels: the next ids, IGNORE_INDEX where another window has them."""

    document: int
    inputs: list[int]
    labels: list[int]


def document_losses(
    model: K3ForConditionalGeneration,
    documents: Sequence[Sequence[int]],
    *,
    window: int = 2048,
    overlap: int | None = None,
    tokens_per_forward: int = 16_384,
) -> list[Tensor]:
    """The losses of `ids[1:]` of each document in nats, float64 [len(ids) - 1] on the CPU.

    Windows are `window` tokens long and overlap by `overlap` (a quarter of them by default): a
    token is predicted from `overlap` tokens before it at least, fewer at the start of a document.
    Windows are packed into passes of `tokens_per_forward` tokens, as separate sequences.
    """
    overlap = window // 4 if overlap is None else overlap
    if not 0 <= overlap < window:
        raise ValueError(f"an overlap of {overlap} is not in 0..{window - 1}, below the window")
    found: list[list[Tensor]] = [[] for _ in documents]
    windows = (
        Window(number, *one)
        for number, ids in enumerate(documents)
        for one in cut_windows(ids, window, overlap)
    )
    for group in grouped(windows, lambda one: [len(one.inputs)], [tokens_per_forward]):
        lengths = [len(one.inputs) for one in group]
        losses_T = _losses(model, group, lengths).double().cpu()
        for one, part_T in zip(group, losses_T.split(lengths), strict=True):
            is_scored = torch.tensor(one.labels) != IGNORE_INDEX
            found[one.document].append(part_T[is_scored])
    none = torch.zeros(0, dtype=torch.float64)
    return [torch.cat(parts) if parts else none for parts in found]


@torch.inference_mode()
def _losses(
    model: K3ForConditionalGeneration, group: Sequence[Window], lengths: list[int]
) -> Tensor:
    inputs_T, labels_T = (
        torch.tensor([i for ids in parts for i in ids], device=model.device)
        for parts in ([one.inputs for one in group], [one.labels for one in group])
    )
    batch = SequenceBatch.from_lengths(lengths, device=model.device)
    hidden_TD = model.forward_packed(inputs_T, batch, output_logits=False).hidden_TD
    losses_T: Tensor = model.ops.linear_cross_entropy(
        hidden_TD,
        model.language_model.lm_head.weight,
        labels_T,
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses_T


def cut_windows(
    ids: Sequence[int], window: int, overlap: int
) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, labels) whose labels other than IGNORE_INDEX are ids[1:], each once."""
    scored = 0  # ids[: scored + 1] need no more score
    while scored < len(ids) - 1:
        start = max(0, scored - overlap)
        stop = min(start + window, len(ids) - 1)
        labels = [IGNORE_INDEX] * (scored - start) + list(ids[scored + 1 : stop + 1])
        yield list(ids[start:stop]), labels
        scored = stop


def grouped(
    items: Iterable[T], sizes: Callable[[T], Sequence[int]], limits: Sequence[int]
) -> Iterator[list[T]]:
    """Runs of items, each of whose `sizes` add up to its limit at most, or of one item."""
    group: list[T] = []
    totals = [0] * len(limits)
    for item in items:
        own = sizes(item)
        added = [total + size for total, size in zip(totals, own, strict=True)]
        if group and any(map(gt, added, limits)):
            yield group
            group, added = [], list(own)
        group.append(item)
        totals = added
    if group:
        yield group
