"""The model's own MTP layer as a draft, chained for more than one token (report 5.4).

The layer reads the output mix of a row and the token behind it, and predicts the one after. It
keeps latents of its own for the rows it has seen since a request last got its slot: a prefix that
came from the cache is missing there, and since the layer knows no positions it does with the rest.

Legend: T rows of a forward, R rows of those, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.cache.contiguous import ContiguousCache
from k3_core.model.batch import SequenceBatch
from k3_serve.engine.request import RequestState
from k3_serve.spec.base import Pass
from k3_serve.spec.choose import check_draft

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration


@dataclass
class _Held:
    """What is known of the request in a slot."""

    request: RequestState
    next_row: int
    """Rows before it were observed without a gap."""
    hidden_D: Tensor
    """The layer's output at the last of them."""
    token_id: int
    """Its guess: the token at `next_row + 1`."""


class MtpDraft:
    """Greedy guesses of the first MTP layer; K3Error for a model that has none.

    Its latents lie in one buffer [slots, longest request, width], a layer's share of the cache.
    """

    needs_hidden = True

    def __init__(self, model: K3ForConditionalGeneration, num_slots: int) -> None:
        check_draft("mtp", model.config)
        self._model, self._num_slots = model, num_slots
        self._layer = model.config.text.num_hidden_layers
        self.reset()

    def reset(self) -> None:
        """Frees the latents of all requests."""
        attention = self._model.language_model.model.layers[self._layer].self_attn
        specs = {self._layer: attention.cache_spec()}  # type: ignore[operator, union-attr]
        like = {"device": self._model.device, "dtype": self._model.dtype}
        self._cache = ContiguousCache(specs, self._num_slots, **like)  # type: ignore[arg-type]
        self._held: dict[int, _Held] = {}

    def forget(self, request: RequestState) -> None:
        """Does nothing: the next request in the slot begins anew."""

    def observe(self, passes: Sequence[Pass], mix_TD: Tensor) -> None:
        """Runs the layer over the rows of the passes."""
        passes = sorted(passes, key=lambda p: p.stop - p.start > 1)  # decode ops take the first
        for one in passes:
            held = self._held.get(one.request.slot)
            if held is None or held.request is not one.request or held.next_row != one.start:
                self._cache.reset(one.request.slot)
        rows = [row for p in passes for row in range(p.offset, p.offset + p.stop - p.start)]
        next_ids = [token for p in passes for token in p.request.rows[p.start + 1 : p.stop + 1]]
        slots = [p.request.slot for p in passes]
        lengths = [p.stop - p.start for p in passes]
        hidden_RD, token_ids = self._run(next_ids, mix_TD[self._tensor(rows)], slots, lengths)
        self._cache.advance(tuple(slots), tuple(lengths))
        for one, hidden_D, token_id in zip(passes, hidden_RD, token_ids, strict=True):
            self._held[one.request.slot] = _Held(one.request, one.stop, hidden_D, token_id)

    def propose(self, asked: Sequence[tuple[RequestState, int]]) -> list[list[int]]:
        """The guess of the last observed row, then guesses behind guesses."""
        drafts: list[list[int]] = [[] for _ in asked]
        chains: list[tuple[_Held, int, list[int]]] = []
        for (request, limit), draft in zip(asked, drafts, strict=True):
            held = self._held.get(request.slot)
            if held is None or held.request is not request or limit == 0:
                continue
            if held.next_row == len(request.rows) - 1:
                draft.append(held.token_id)
                chains.append((held, limit, draft))
        hidden_D = [held.hidden_D for held, _, _ in chains]
        while live := [i for i, (_, limit, draft) in enumerate(chains) if len(draft) < limit]:
            chains = [chains[i] for i in live]
            slots = [held.request.slot for held, _, _ in chains]
            # Latents of guesses lie behind the rows that count and are overwritten by these.
            starts = [
                self._cache.lengths[held.request.slot] + len(draft) - 1 for held, _, draft in chains
            ]
            next_ids = [draft[-1] for _, _, draft in chains]
            mix_RD = torch.stack([hidden_D[i] for i in live])
            hidden_RD, token_ids = self._run(next_ids, mix_RD, slots, [1] * len(slots), starts)
            hidden_D = list(hidden_RD)
            for (_, _, draft), token_id in zip(chains, token_ids, strict=True):
                draft.append(token_id)
        return drafts

    def _run(
        self,
        next_ids: list[int],
        mix_TD: Tensor,
        slots: list[int],
        lengths: list[int],
        starts: list[int] | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Hidden state and greedy guess at the last row of each sequence."""
        batch = SequenceBatch.from_lengths(
            lengths, device=self._model.device, cache=self._cache, slots=slots, starts=starts
        )
        hidden_TD, normed_TD = self._model.mtp_hidden(self._tensor(next_ids), mix_TD, batch)
        last_R = batch.cu_seqlens_N1[1:] - 1
        logits_RV = self._model.ops.linear(normed_TD[last_R], self._model.mtp_head_weight())
        return hidden_TD[last_R], logits_RV.argmax(-1).tolist()

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._model.device, non_blocking=True)
