"""Greedy decoding of many prompts at once: the throughput side of an evaluation.

Legend: T packed tokens, B sequences that still run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.model.batch import SequenceBatch

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration


@torch.inference_mode()
def generate_greedy(
    model: K3ForConditionalGeneration,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: frozenset[int],
    max_tokens: int,
    batch_size: int = 200,
) -> list[list[int]]:
    """The likeliest continuation of each prompt, up to a stop id (kept) or `max_tokens` ids.

    `batch_size` prompts run side by side; a sequence leaves its batch when it stops.
    """
    results: list[list[int]] = []
    for first in range(0, len(prompts), batch_size):
        group = prompts[first : first + batch_size]
        longest = max(len(prompt) for prompt in group) + max_tokens
        cache = model.new_cache(len(group), max_length=longest)
        pieces = [list(prompt) for prompt in group]
        found: list[list[int]] = [[] for _ in group]
        slots = list(range(len(group)))
        while slots:
            lengths = [len(pieces[slot]) for slot in slots]
            batch = SequenceBatch.from_lengths(
                lengths, device=model.device, cache=cache, slots=slots
            )
            flat = [token for slot in slots for token in pieces[slot]]
            ids_T = torch.tensor(flat, device=model.device)
            for slot, token in zip(slots, _next(model, ids_T, batch).tolist(), strict=True):
                found[slot].append(token)
                pieces[slot] = [token]
            slots = [
                s for s in slots if found[s][-1] not in stop_ids and len(found[s]) < max_tokens
            ]
        results += found
    return results


def _next(model: K3ForConditionalGeneration, ids_T: Tensor, batch: SequenceBatch) -> Tensor:
    logits_BV = model.forward_packed(ids_T, batch, logit_rows=batch.cu_seqlens_N1[1:] - 1).logits
    assert logits_BV is not None
    return logits_BV.argmax(-1)
