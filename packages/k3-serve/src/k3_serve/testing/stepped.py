"""The continuous engine without its thread: a test decides when a step happens.

Every byte of the cache is NaN before it is written, so that reading what was never written shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from k3_core.config import K3Config
from k3_core.engine import Completion, EventStream, Request, Suspended, fold_events
from k3_core.engine.sequence import Sequence
from k3_core.model import K3ForConditionalGeneration
from k3_serve.engine.core import ContinuousEngine
from k3_serve.engine.plan import StepPlan
from k3_serve.engine.runner import StepLogits


def tiny_model(
    dtype: torch.dtype = torch.float64, seed: int = 0, num_mtp_layers: int = 0
) -> K3ForConditionalGeneration:
    """The `k3-test` preset with random weights; KDA token by token, so that chunks do not matter.

    The output head is scaled up: near-ties among logits would make greedy answers chance.
    """
    config = K3Config.preset("k3-test")
    text = replace(
        config.text,
        max_position_embeddings=512,
        num_nextn_predict_layers=num_mtp_layers,
        mtp_share_embeddings=True,
    )
    model = K3ForConditionalGeneration(
        replace(config, text=text),
        dtype=dtype,
        impl_overrides={"kernel.kda_chunk": "kda_chunk.reference"},
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
        model.language_model.lm_head.weight.mul_(50)
    return model.eval()


class SteppedWorker:
    """A worker of the tiers whose jobs run when a test says so."""

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None], is_optional: bool = False) -> bool:
        if is_optional and len(self.jobs) >= self.limit:
            return False
        self.jobs.append(job)
        return True

    def run(self, most: int | None = None) -> None:
        """Runs the oldest jobs, all by default."""
        with torch.inference_mode():
            for _ in range(len(self.jobs) if most is None else min(most, len(self.jobs))):
                self.jobs.popleft()()

    def close(self, seconds: float) -> None:
        self.run()


class SteppedEngine(ContinuousEngine):
    """`step` runs what was asked for since the last one, then one step.

    `rows` holds, by handle, the logits that each of its tokens was drawn from. The workers of the
    tiers, `reader` and `writer`, run their jobs before a step, or only when the test runs them
    while `is_io_held`.
    """

    _worker = SteppedWorker
    is_io_held = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.plans: list[StepPlan] = []
        super().__init__(*args, **options)

    def _start(self) -> None:
        self.spoil()

    def spoil(self) -> None:
        """Makes all bytes of the cache and the slots NaN."""
        cache = self._runner.cache
        cache.arena.bytes_PB.fill_(0xFF)
        cache.rows.bytes_SB.fill_(0xFF)

    @property
    def reader(self) -> SteppedWorker:
        """What restores run on."""
        assert self._tiers is not None and isinstance(self._tiers.reader, SteppedWorker)
        return self._tiers.reader

    @property
    def writer(self) -> SteppedWorker:
        """What writes files."""
        assert self._tiers is not None and isinstance(self._tiers.writer, SteppedWorker)
        return self._tiers.writer

    def run_commands(self) -> None:
        """Runs what was asked for since the last step."""
        while not self._commands.empty():
            command = self._commands.get()
            assert command is not None
            command()

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        with torch.inference_mode():
            if self._tiers is not None and not self.is_io_held:
                self.reader.run()
                self.writer.run()
            self.run_commands()
            if self._is_idle():
                return False
            return self._turn()

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until idle; the number of steps."""
        for count in range(max_steps):
            if not self.step():
                return count
        raise AssertionError(f"not idle after {max_steps} steps: {self.stats()}")

    def answer(self, requests: list[Request]) -> list[Completion]:
        """Runs requests together to their end."""
        handles = [self.submit(request) for request in requests]
        self.run()
        return [fold_events(list(handle), handle.prompt_logprobs) for handle in handles]

    def suspend_now(self, handle: EventStream) -> Suspended:
        """`suspend`, between two steps."""
        self.run_commands()
        return self._suspend(handle)

    def _finish_step(self, plan: StepPlan, logits: StepLogits) -> None:
        self.plans.append(plan)
        super()._finish_step(plan, logits)

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        for sequence, row_V in zip(sequences, logits_BV, strict=True):
            self.rows.setdefault(sequence.handle.request_id, []).append(row_V.clone())
        super()._draw(sequences, logits_BV)
