"""Steps that only decode as graphs: one replay for hundreds of launches (serving.md 3).

A graph is a CUDA graph or, on a CPU, a recording (`k3_core.replay`). One is kept for each bucket of
rows and of page columns, captured when a step first needs it, on rows that are all padded. Its
inputs are three numbers a row: token id, slot, position.

Legend: B rows, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.engine.sequence import Sequence
from k3_core.model.batch import PADDED, SequenceBatch
from k3_core.ops import OpSet
from k3_core.replay import Recording
from k3_serve.engine.paged import PagedCache
from k3_serve.engine.plan import StepPlan
from k3_serve.engine.request import RequestState

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration

DECODE_OPS = (
    "linear",
    "kda_decode",
    "gated_mla_decode",
    "rms_norm",
    "attn_res",
    "depth_read",
    "situ_glu",
    "latent_router",
    "route_topk",
    "moe_experts",
)
"""What a decode step runs; a graph can hold those that declare the feature `graph_safe`."""
FEWEST_COLUMNS = 16
"""Page columns of the smallest graphs; each bucket has twice those of the one before."""
PREPARED = 32
"""Rows up to which a CPU has its graphs before there are requests."""
WARMUP = 2
"""Runs before a capture, in which kernels are compiled and workspaces allocated."""


def unsafe_ops(ops: OpSet) -> list[str]:
    """The implementations of a decode step that wait for the host, or do not say otherwise."""
    chosen = [ops.resolutions[name].chosen for name in DECODE_OPS]
    return [impl.name for impl in chosen if "graph_safe" not in impl.features]


class CaptureError(RuntimeError):
    """The model's decode step cannot be captured; no row of a sequence was touched."""


class _Unbooked(PagedCache):
    """The same tensors as a cache whose host-side books stay as they are."""

    def __init__(self, cache: PagedCache) -> None:
        vars(self).update(vars(cache))

    def check_room(self, lengths: tuple[int, ...]) -> None:
        """The step's own lengths are checked before it."""

    def advance(self, slots: tuple[int, ...], seqlens: tuple[int, ...]) -> None:
        """The step advances the cache itself."""


@dataclass(frozen=True)
class _Graph:
    host_3B: Tensor
    """Pinned; the logits of the step before have been read, and so has this."""
    inputs_3B: Tensor
    logits_BV: Tensor
    mix_BD: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs decode-only steps of at most `max_rows` rows on a model and an open cache."""

    def __init__(self, model: K3ForConditionalGeneration, cache: PagedCache, max_rows: int) -> None:
        self._model, self._cache = model, _Unbooked(cache)
        self._max_rows = max_rows
        self._is_cuda = cache.device.type == "cuda"
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def prepare(self) -> None:
        """Captures the smallest graph, for which kernels are compiled. Raises CaptureError.

        On a CPU, where one takes 50 ms once that is done, those of up to `PREPARED` rows too: as
        much as ten steps, for which requests would wait.
        """
        for num_rows in range(1, 2 if self._is_cuda else min(self._max_rows, PREPARED) + 1):
            self._graph(num_rows, self._num_columns(1))

    def takes(self, plan: StepPlan, sequences: Mapping[RequestState, Sequence]) -> bool:
        """Whether a step is one token of each of its requests, which want its logits."""
        if plan.prefills or not 0 < len(plan.decodes) <= self._max_rows:
            return False
        return all(
            one.wants_logits
            and one.num_tokens == 1
            and one.start >= one.request.images_end
            and not sequences[one.request].needs_prompt_logprobs
            for one in plan.decodes
        )

    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and output mix [B, D] of the plan's decodes, until the next such run."""
        rows = plan.decodes
        num_rows = self._num_rows(len(rows))
        most_tokens = max(one.stop for one in rows)
        graph = self._graph(num_rows, self._num_columns(most_tokens))
        ids = [one.request.rows[one.start] for one in rows]
        padding = num_rows - len(rows)
        slots, positions = [one.slot for one in rows], [one.start for one in rows]
        inputs = [ids + [0] * padding, slots + [PADDED] * padding, positions + [0] * padding]
        graph.host_3B.copy_(torch.tensor(inputs))
        graph.inputs_3B.copy_(graph.host_3B, non_blocking=True)
        graph.replay()
        return graph.logits_BV[: len(rows)], graph.mix_BD[: len(rows)]

    def _num_rows(self, num_rows: int) -> int:
        """Padded rows cost a GPU next to nothing and a CPU as much as others."""
        return min(1 << (num_rows - 1).bit_length(), self._max_rows) if self._is_cuda else num_rows

    def _num_columns(self, num_tokens: int) -> int:
        columns, wanted = FEWEST_COLUMNS, -(-num_tokens // self._cache.page_tokens)
        while columns < wanted:
            columns *= 2
        return min(columns, self._cache.num_columns)

    def _graph(self, num_rows: int, num_columns: int) -> _Graph:
        key = (num_rows, num_columns)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(num_rows, num_columns)
            except Exception as error:
                raise CaptureError(f"{type(error).__name__}: {error}") from error
        return self._graphs[key]

    @torch.inference_mode()
    def _capture(self, num_rows: int, num_columns: int) -> _Graph:
        host_3B = torch.zeros(3, num_rows, dtype=torch.int64, pin_memory=self._is_cuda)
        host_3B[1] = PADDED
        inputs_3B = host_3B.to(self._cache.device, copy=True)

        def step() -> tuple[Tensor, Tensor]:
            most_tokens = num_columns * self._cache.page_tokens
            batch = SequenceBatch.of_rows(inputs_3B[1], inputs_3B[2], self._cache, most_tokens)
            output = self._model.forward_packed(inputs_3B[0], batch)
            assert output.logits is not None
            return output.logits, output.mix_TD

        if not self._is_cuda:
            recording = Recording(step)
            return _Graph(host_3B, inputs_3B, *recording.result, recording.replay)
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                step()
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = step()
        return _Graph(host_3B, inputs_3B, *results, graph.replay)
