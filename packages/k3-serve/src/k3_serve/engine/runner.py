"""Executes a step plan on a model: copies, one packed forward, checkpoints (report 5.4).

Legend: T rows of the forward, R rows whose logits are wanted, B of them that give a next token,
V vocabulary, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.engine.runner import copy_weights, embed_images
from k3_core.engine.sequence import Sequence as Generation
from k3_core.model.batch import SequenceBatch
from k3_core.modules import join
from k3_serve.cache.arena import Arena, ArenaLayout
from k3_serve.engine.graphs import CaptureError, DecodeGraphs, unsafe_ops
from k3_serve.engine.paged import PagedCache, StagedCheckpoints
from k3_serve.engine.plan import Save, Slice, StepPlan
from k3_serve.engine.request import RequestState

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration


logger = logging.getLogger("k3_serve.engine")


class RequestFault(Exception):
    """One request of a step cannot be run; the cause is the exception's `__cause__`."""

    def __init__(self, request: RequestState) -> None:
        super().__init__(request.request_id)
        self.request = request


@dataclass(frozen=True)
class StepLogits:
    """What the forward of a step gives."""

    next_BV: Tensor
    """For the slices that want logits, in the order of the plan; 1 + len(draft) rows each."""
    prompts: dict[RequestState, Tensor]
    """All rows of the slices of requests that score their prompt."""
    mix_TD: Tensor | None = None
    """What an MTP layer reads, of all rows of the forward, when it was asked for."""
    batch: SequenceBatch | None = None
    """The forward's batch when it has drafted rows: `accept` comes next."""


class PagedRunner:
    """A model in inference mode; the arena exists between `open` and `close`."""

    def __init__(self, model: K3ForConditionalGeneration, page_tokens: int) -> None:
        self.model = model.eval()
        join(self.model)
        layers = model.language_model.model.layers
        specs = {
            index: layers[index].self_attn.cache_spec()  # type: ignore[union-attr, operator]
            for index in range(model.config.text.num_hidden_layers)
        }
        self.layout = ArenaLayout.of(specs, page_tokens, model.dtype)
        self._cache: PagedCache | None = None
        self._graphs: DecodeGraphs | None = None

    def open(self, num_pages: int, num_slots: int, max_length: int) -> None:
        """Allocates the arena and the slots."""
        arena = Arena(self.layout, num_pages, self.model.device)
        self._cache = PagedCache(arena, num_slots, max_length)
        if unsafe := unsafe_ops(self.model.ops):
            logger.info("decode steps run without graphs: %s", ", ".join(unsafe))
        else:
            self._graphs = DecodeGraphs(self.model, self._cache, num_slots)

    def prepare(self) -> None:
        """Compiles what a decode step runs, where it is not in a cache of compiled code."""
        if self._graphs is None:
            return
        try:
            self._graphs.prepare()
        except CaptureError as error:
            self._give_up_graphs(error)

    def _give_up_graphs(self, error: CaptureError) -> None:
        logger.warning("decode steps run without graphs from now on: %s", error)
        self._graphs = None

    def close(self) -> None:
        """Frees the arena and the slots."""
        self._cache = self._graphs = None

    @property
    def cache(self) -> PagedCache:
        """The cache of an open runner."""
        assert self._cache is not None, "the runner is closed; open it first"
        return self._cache

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into the weights of their names; on a bad one, none is copied."""
        copy_weights(self.model, tensors)

    def run(
        self,
        plan: StepPlan,
        sequences: Mapping[RequestState, Generation],
        needs_mix: bool = False,
    ) -> StepLogits:
        """One step. Raises RequestFault for a request whose images cannot be embedded.

        After an exception the slots of the plan's requests are void.
        """
        cache = self.cache
        for one in plan.slices:
            self._embed(one, sequences[one.request])
        self._copy_in(plan, cache)
        if self._graphs is not None and self._graphs.takes(plan, sequences):
            try:
                return self._replay(plan, cache, self._graphs)
            except CaptureError as error:
                self._give_up_graphs(error)
        staged, extents = self._stage(plan, cache)
        batch = SequenceBatch.from_lengths(
            [one.num_tokens for one in plan.slices],
            device=cache.device,
            cache=cache,
            slots=[one.slot for one in plan.slices],
            num_decode=len(plan.decodes),
            checkpoints=staged,
            is_verify=any(one.draft for one in plan.decodes),
        )
        ids_T, embeds_TD = self._inputs(plan, sequences)
        rows, scored = _wanted_rows(plan, sequences)
        output = self.model.forward_packed(
            ids_T,
            batch,
            inputs_embeds_TD=embeds_TD,
            # One at least: not every kernel takes an empty batch.
            logit_rows=torch.tensor(rows or [0]).to(cache.device, non_blocking=True),
            output_logits=bool(rows),
            is_cut=not needs_mix,
        )
        mix_TD = output.mix_TD if needs_mix else None
        if staged is not None:
            cache.store(staged, extents)
        if not batch.is_verify and (slots := _slot_saves(plan)):
            cache.save(slots)
        if output.logits is None:
            return StepLogits(output.hidden_TD.new_empty(0, 0), {}, mix_TD)
        sizes = [len(rows) - sum(scored.values()), *scored.values()]
        next_BV, *prompts = output.logits.split(sizes)
        pending = batch if batch.is_verify else None
        prompt_of = dict(zip(scored, prompts, strict=True))
        return StepLogits(next_BV, prompt_of, mix_TD, pending)

    def accept(self, plan: StepPlan, batch: SequenceBatch, counts: Sequence[int]) -> None:
        """Ends a step with drafted rows: the first `counts[i]` rows of decode i count.

        Checkpoints of the decoding requests are taken here, of those that got to their place.
        """
        batch.accept(counts)
        ends = {one.request: one.start + n for one, n in zip(plan.decodes, counts, strict=True)}
        reached = [s for s in plan.saves if ends.get(s.request, s.num_tokens) == s.num_tokens]
        if slots := _slot_saves(replace(plan, saves=tuple(reached))):
            self.cache.save(slots)

    def _replay(self, plan: StepPlan, cache: PagedCache, graphs: DecodeGraphs) -> StepLogits:
        """A step of one token of each request."""
        cache.check_room(tuple(one.stop for one in plan.decodes))
        logits_BV, mix_BD = graphs.run(plan)
        cache.advance(tuple(one.slot for one in plan.decodes), (1,) * len(plan.decodes))
        if slots := _slot_saves(plan):
            cache.save(slots)
        return StepLogits(logits_BV, {}, mix_BD)

    def _copy_in(self, plan: StepPlan, cache: PagedCache) -> None:
        if plan.page_copies:
            cache.arena.copy_pages(list(plan.page_copies))
        restores = []
        for restore in plan.restores:
            if restore.extent is None:
                cache.reset(restore.slot)
            else:
                restores.append((restore.slot, restore.extent, restore.num_tokens))
        if restores:
            cache.restore(restores)
        cache.list_pages((one.slot, one.pages) for one in plan.slices)

    def _stage(
        self, plan: StepPlan, cache: PagedCache
    ) -> tuple[StagedCheckpoints | None, list[tuple[int, ...]]]:
        """The checkpoints inside prefills: offsets for the forward, extents in their order."""
        saves: dict[RequestState, list[Save]] = {}
        for save in plan.saves:
            saves.setdefault(save.request, []).append(save)
        offsets: list[tuple[int, ...]] = [()] * len(plan.decodes)
        extents = []
        for one in plan.prefills:
            own = sorted(saves.get(one.request, ()), key=lambda s: s.num_tokens)
            offsets.append(tuple(save.num_tokens - one.start for save in own))
            extents += [save.extent for save in own]
        if not extents:
            return None, []
        return StagedCheckpoints(self.layout, tuple(offsets), cache.device), extents

    def _embed(self, one: Slice, sequence: Generation) -> None:
        """Rows of features for a prompt whose images the slice still needs."""
        images = sequence.request.images
        if images is None or one.start >= one.request.images_end or sequence.embeds_TD is not None:
            return
        try:
            embed_images(self.model, sequence, images, self.model.device)
        except Exception as error:
            raise RequestFault(one.request) from error

    def _inputs(
        self, plan: StepPlan, sequences: Mapping[RequestState, Generation]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Ids [T], or embeddings [T, D] when a slice has image rows."""
        rows = [row for one in plan.slices for row in one.ids]
        ids_T = torch.tensor(rows).to(self.model.device, non_blocking=True)
        if all(sequences[one.request].embeds_TD is None for one in plan.slices):
            return ids_T, None
        embeds_TD = self.model.embed_prompt(ids_T)
        offset = 0
        for one in plan.slices:
            known_TD = sequences[one.request].embeds_TD
            if known_TD is not None and one.start < len(known_TD):
                stop = offset + min(one.stop, len(known_TD)) - one.start
                embeds_TD[offset:stop] = known_TD[one.start : one.stop]
            offset += one.num_tokens
        return None, embeds_TD


def _wanted_rows(
    plan: StepPlan, sequences: Mapping[RequestState, Generation]
) -> tuple[list[int], dict[RequestState, int]]:
    """Rows of the forward whose logits are wanted, and how many of them score which prompt."""
    last: list[int] = []
    whole: list[int] = []
    scored: dict[RequestState, int] = {}
    offset = 0
    for one in plan.slices:
        end = offset + one.num_tokens
        if one.wants_logits:
            last += range(end - 1 - len(one.draft), end)
        if sequences[one.request].needs_prompt_logprobs:
            whole += range(offset, end)
            scored[one.request] = one.num_tokens
        offset = end
    return last + whole, scored


def _slot_saves(plan: StepPlan) -> list[tuple[int, tuple[int, ...]]]:
    """Checkpoints of decoding requests: their slots hold the states after the forward."""
    decoding = {one.request: one.slot for one in plan.decodes}
    return [(decoding[s.request], s.extent) for s in plan.saves if s.request in decoding]
