"""The simplest right engine: one thread, one contiguous cache, a slot for each running request.

Each step admits requests to free slots, prefills one chunk of one prompt, and decodes one token
for every request whose prompt is in the cache, as one packed forward (report 5.4 describes the
full system, which replaces this engine and nothing else).
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch

from k3_core.engine.handle import EventStream, fold_events
from k3_core.engine.protocol import (
    DEFAULT_MAX_TOKENS,
    Completion,
    FinishReason,
    Handle,
    Request,
    Stats,
    TokenLogprob,
)
from k3_core.engine.runner import Runner
from k3_core.engine.sampling import raw_logprobs, sample_rows, token_logprob
from k3_core.engine.sequence import UNPLACED, Sequence
from k3_core.engine.suspended import Suspended, with_seed

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

T = TypeVar("T")


class SimpleEngine:
    """`Engine` over a model and a contiguous hybrid cache.

    Use it as a context manager, or call `close`: it owns a thread. The requests belong to that
    thread; other threads reach them by commands that it runs between two steps.
    """

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
        self._tokenizer = tokenizer
        self._max_length = min(max_length or 2**63, self._runner.max_length)
        self._prefill_chunk = prefill_chunk
        self._version = version
        self._free_slots = list(range(max_batch))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._ids = itertools.count()
        self._num_finished = self._num_failed = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="k3-engine", daemon=True)
        self._thread.start()

    # Called from any thread.

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, request: Request) -> Handle:
        return self.resume(Suspended(request, ()))

    def resume(self, suspended: Suspended) -> Handle:
        request = suspended.request
        num_rows = len(request.token_ids) + self._runner.num_image_rows(request.images)
        max_tokens = self._check(request, num_rows)
        if request.sampling.seed is None:
            request = with_seed(request, secrets.randbits(63))
        handle = EventStream(f"request-{next(self._ids)}", num_rows)
        state = Suspended(request, suspended.generated)
        sequence = Sequence(handle, state, max_tokens, self._tokenizer)
        self._send(lambda: self._enqueue(sequence))
        return handle

    def generate(self, requests: list[Request]) -> list[Completion]:
        handles = [self.submit(request) for request in requests]
        return [fold_events(list(handle), handle.prompt_logprobs) for handle in handles]

    def abort(self, handle: Handle) -> None:
        self._send(lambda: self._abort(handle))

    def suspend(self, handle: Handle) -> Suspended:
        return self._call(lambda: self._suspend(handle))

    def update_weights(
        self,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        tensors = dict(named_tensors)
        self._call(lambda: self._update_weights(tensors, version))

    def stats(self) -> Stats:
        return Stats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            version=self._version,
        )

    def close(self) -> None:
        with self._gate:
            self._is_closed = True
            self._commands.put(None)
        self._thread.join()

    def __enter__(self) -> SimpleEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, command: Callable[[], None]) -> None:
        with self._gate:  # nothing may follow the None of `close`: it would never run
            if self._is_closed:
                raise RuntimeError("the engine is closed; make a new one")
            self._commands.put(command)

    def _call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread and returns its result or raises its error."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._send(command)
        return future.result()

    def _check(self, request: Request, num_rows: int) -> int:
        """The number of tokens the request may generate; ValueError when it can never run."""
        sampling, vocab = request.sampling, self._runner.vocab_size
        if not request.token_ids:
            raise ValueError("the prompt is empty; give at least one token id")
        for name, ids in (("token id", request.token_ids), ("logit_bias id", sampling.logit_bias)):
            bad = next((i for i in ids if not 0 <= i < vocab), None)
            if bad is not None:
                raise ValueError(f"{name} {bad} is outside the vocabulary 0..{vocab - 1}")
        room = self._max_length - num_rows
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(room, DEFAULT_MAX_TOKENS))
        if max_tokens > room:
            raise ValueError(
                f"the prompt's {num_rows} tokens and {max_tokens} more exceed the context of "
                f"{self._max_length} tokens; shorten the prompt or lower max_tokens"
            )
        if sampling.has_prompt_logprobs and request.images is not None:
            raise ValueError("has_prompt_logprobs is not defined with images; drop one of them")
        return max_tokens

    # Called from the engine's thread.

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while self._run_commands():
                    self._step()
        finally:
            self._is_closed = True
            for sequence in [*self._running, *self._waiting]:
                self._finish(sequence, "abort")

    def _run_commands(self) -> bool:
        """Runs what other threads asked for, waiting when idle; False when closed."""
        while True:
            is_idle = not self._running and not self._waiting
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda s: -s.request.priority)  # stable: else first come first

    def _find(self, handle: Handle) -> Sequence | None:
        everyone = (*self._running, *self._waiting)
        return next((s for s in everyone if s.handle is handle), None)

    def _abort(self, handle: Handle) -> None:
        if (sequence := self._find(handle)) is not None:
            self._finish(sequence, "abort")

    def _suspend(self, handle: Handle) -> Suspended:
        sequence = self._find(handle)
        if sequence is None:
            raise ValueError(f"{handle.request_id} has ended; suspend a waiting or running one")
        self._finish(sequence, "suspended")
        return sequence.suspended()

    def _update_weights(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        self._runner.update_weights(tensors)
        self._version = version
        for sequence in self._running:  # what the old weights left in the cache is void
            self._runner.reset(sequence)
            sequence.forget_cache()

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.end(reason, self._version, error)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot == UNPLACED:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._free_slots.append(sequence.slot)
        self._num_finished += 1
        self._num_failed += sequence.has_failed

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
            sequence.prompt_logprobs += _score(sequence, logits_RV, start)
        sequence.num_fed = stop
        if stop < total:
            return
        sequence.end_prefill()
        self._num_prompt_tokens += total
        if sequence.max_tokens == 0:
            sequence.end("length", self._version)
        else:
            self._draw(sequences, logits_RV[-1:])

    def _decode(self, sequences: list[Sequence]) -> None:
        """One token for each sequence, in one packed forward."""
        self._draw(sequences, self._runner.feed(sequences, -1, None))

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        samplings = [sequence.request.sampling for sequence in sequences]
        positions = [len(sequence.ids) for sequence in sequences]
        tokens = sample_rows(logits_BV, samplings, positions)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None:
                sequence.end("error", self._version, "the logits are not finite")
            else:
                self._emit(sequence, token)

    def _emit(self, sequence: Sequence, token: TokenLogprob) -> None:
        self._num_generated_tokens += 1
        try:
            sequence.emit(token, self._version)
        except Exception as error:  # a parser or tokenizer that trips over this row's token
            sequence.end("error", self._version, f"{type(error).__name__}: {error}")


def _score(sequence: Sequence, logits_TV: torch.Tensor, start: int) -> list[TokenLogprob | None]:
    """Log-probabilities of ids start+1 .. start+T, by the rows before them."""
    targets = sequence.ids[start + 1 : start + 1 + len(logits_TV)]
    num_top = sequence.request.sampling.top_logprobs
    rows = raw_logprobs(logits_TV)[: len(targets)]
    return [token_logprob(row, i, num_top) for row, i in zip(rows, targets, strict=True)]
