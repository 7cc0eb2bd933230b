"""The simplest right engine: one thread, one contiguous cache, a slot for each running request.

Each step admits requests to free slots, prefills one chunk of one prompt, and decodes one token
for every request whose prompt is in the cache, as one packed forward (report 5.4 describes the
full system, which replaces this engine and nothing else).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3_core.engine.drawing import draw, score_prompt
from k3_core.engine.protocol import Images
from k3_core.engine.runner import Runner
from k3_core.engine.sequence import UNPLACED, Sequence
from k3_core.engine.threaded import ThreadedEngine

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer


class SimpleEngine(ThreadedEngine):
    """`Engine` over a model and a contiguous hybrid cache."""

    def __init__(
        self,
        model: K3ForConditionalGeneration,
        tokenizer: K3Tokenizer | None = None,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        version: int = 0,
    ) -> None:
        self._runner = Runner(model, max_batch)
        length = min(max_length or 2**63, self._runner.max_length)
        super().__init__(tokenizer, self._runner.vocab_size, length, version)
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._reset()
        self._start()

    def _reset(self) -> None:
        self._free_slots = list(range(self._max_batch))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    def _num_image_rows(self, images: Images | None) -> int:
        return sum(count - 1 for count in self._runner.rows_of_images(images))

    def _sequences(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def _counts(self) -> tuple[int, int]:
        return len(self._waiting), len(self._running)

    def _prepare(self, sequence: Sequence) -> Callable[[], None]:
        return lambda: self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda s: -s.request.priority)  # stable: else first come first

    def _drop(self, sequence: Sequence) -> None:
        if sequence.slot == UNPLACED:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._free_slots.append(sequence.slot)

    def _replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._runner.update_weights(tensors)
        for sequence in self._running:  # what the old weights left in the cache is void
            self._runner.reset(sequence)
            sequence.forget_cache()

    def _step(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting.pop(0)
            sequence.slot = self._free_slots.pop()
            self._runner.reset(sequence)
            self._running.append(sequence)
        decoding = [s for s in self._running if s.is_prefilled]
        prefilling = [s for s in self._running if not s.is_prefilled][:1]
        for sequences, work in ((prefilling, self._prefill), (decoding, self._decode)):
            if sequences:
                self._attempt(sequences, work)

    def _attempt(self, sequences: list[Sequence], work: Callable[[list[Sequence]], None]) -> None:
        """Does a step's work for sequences; an exception ends those and no others."""
        try:
            work(sequences)
        except Exception as error:
            for sequence in sequences:
                if not sequence.is_ended:
                    self._finish(sequence, "error", f"{type(error).__name__}: {error}")
        for sequence in sequences:
            if sequence.is_ended and sequence in self._running:
                self._release(sequence)

    def _prefill(self, sequences: list[Sequence]) -> None:
        """Feeds the next chunk of one prompt and, at its end, draws the first token."""
        (sequence,) = sequences
        if sequence.num_fed == 0:
            self._runner.embed(sequence)
        start, total = sequence.num_fed, sequence.num_rows
        stop = min(start + self._prefill_chunk, total)
        has_all = sequence.needs_prompt_logprobs
        logits_RV = self._runner.feed(sequences, start, stop, 0 if has_all else stop - start - 1)
        if has_all:
            sequence.prompt_logprobs += score_prompt(sequence, logits_RV, start)
        sequence.num_fed = stop
        if stop < total:
            return
        sequence.end_prefill()
        self._num_prompt_tokens += total
        self._draw(sequences, logits_RV[-1:])

    def _decode(self, sequences: list[Sequence]) -> None:
        """One token for each sequence, in one packed forward."""
        self._draw(sequences, self._runner.feed(sequences, -1, None))

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        self._num_generated_tokens += draw(sequences, logits_BV, self._version).num_tokens
