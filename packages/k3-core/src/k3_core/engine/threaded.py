"""What engines that own a thread share: commands, admission checks and counters (report 5.4).

The requests belong to the engine's thread; other threads reach them by commands that it runs
between two steps.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch

from k3_core.engine.handle import EventStream, fold_events, waking_at_end
from k3_core.engine.protocol import (
    DEFAULT_MAX_TOKENS,
    Completion,
    FinishReason,
    Handle,
    Images,
    Request,
    Stats,
)
from k3_core.engine.sequence import Sequence
from k3_core.engine.suspended import Suspended, with_seed

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

logger = logging.getLogger("k3_core.engine")
MAX_FAULTS_IN_A_ROW = 3
T = TypeVar("T")
S = TypeVar("S", bound="ThreadedEngine")


class ThreadedEngine(ABC):
    """The `Engine` protocol but for the steps themselves.

    Use it as a context manager, or call `close`. A subclass calls `_start` when it is ready.
    """

    def __init__(
        self, tokenizer: K3Tokenizer | None, vocab_size: int, max_length: int, version: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._max_length = vocab_size, max_length
        self._version = version
        self._ids = itertools.count()
        self._num_finished = self._num_failed = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_faults_in_a_row = 0
        self.num_restarts = 0
        """How often the loop began anew after a fault of the engine."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="k3-engine", daemon=True)

    def _start(self) -> None:
        self._thread.start()

    # What a subclass gives; called from the engine's thread unless said otherwise.

    @abstractmethod
    def _num_image_rows(self, images: Images | None) -> int:
        """Rows that the images add to the prompt beyond their one placeholder id each.

        Called from the caller's thread.
        """

    @abstractmethod
    def _sequences(self) -> list[Sequence]:
        """Every request that has not ended."""

    @abstractmethod
    def _counts(self) -> tuple[int, int]:
        """Numbers of waiting and of running requests; called from any thread."""

    @abstractmethod
    def _prepare(self, sequence: Sequence) -> Callable[[], None]:
        """How to take a new request in, as a command for the engine's thread.

        Called from the caller's thread; raises EngineBusy when the request cannot be queued.
        """

    @abstractmethod
    def _drop(self, sequence: Sequence) -> None:
        """Forgets a request that has ended and frees what it holds."""

    @abstractmethod
    def _replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies weights and voids the caches; the version is already the new one."""

    @abstractmethod
    def _step(self) -> None:
        """Does the next piece of work; not called when there is no request.

        What one request causes ends that request here; an exception is a fault of the engine.
        """

    @abstractmethod
    def _reset(self) -> None:
        """Begins anew without a request and with empty caches, whatever the state is."""

    def _is_idle(self) -> bool:
        """Whether the thread may wait for the next command."""
        return not self._sequences()

    # Called from any thread.

    @property
    def is_alive(self) -> bool:
        """False when the thread has ended, or nothing but faults came of its last steps."""
        return self._thread.is_alive() and self._num_faults_in_a_row < MAX_FAULTS_IN_A_ROW

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, request: Request) -> Handle:
        return self.resume(Suspended(request, ()))

    def resume(self, suspended: Suspended) -> Handle:
        sequence = self._new_sequence(suspended)
        self._send(self._prepare(sequence))
        return sequence.handle

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
        num_waiting, num_running = self._counts()
        return Stats(
            num_waiting=num_waiting,
            num_running=num_running,
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

    def __enter__(self: S) -> S:
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

    def _new_sequence(self, suspended: Suspended) -> Sequence:
        request = suspended.request
        num_rows = len(request.token_ids) + self._num_image_rows(request.images)
        max_tokens = self._check(request, num_rows)
        if request.sampling.seed is None:
            request = with_seed(request, secrets.randbits(63))
        handle = EventStream(f"request-{next(self._ids)}", num_rows)
        state = Suspended(request, suspended.generated)
        return Sequence(handle, state, max_tokens, self._tokenizer)

    def _check(self, request: Request, num_rows: int) -> int:
        """The number of tokens the request may generate; ValueError when it can never run."""
        sampling, vocab = request.sampling, self._vocab_size
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
                while self._turn():
                    pass
        finally:
            self._is_closed = True
            for sequence in self._sequences():
                self._finish(sequence, "abort")

    def _turn(self) -> bool:
        """Commands and a step; False when closed. A fault of the engine ends no more than that.

        Every request ends with the error and the loop begins anew, since nothing that the fault
        touched can be trusted.
        """
        try:
            is_open = self._run_commands()
            if is_open:
                with waking_at_end():
                    self._step()
                self._num_faults_in_a_row = 0
            return is_open
        except Exception as error:
            place = "".join(traceback.format_tb(error.__traceback__))
            # Not its message, which may hold content.
            logger.error("the engine begins anew after %s\n%s", type(error).__name__, place)
            self._num_faults_in_a_row += 1
            self.num_restarts += 1
            for sequence in self._sequences():
                if not sequence.is_ended:
                    sequence.end("error", self._version, f"{type(error).__name__} in the engine")
                    self._num_finished += 1
                    self._num_failed += 1
            self._reset()
            return True

    def _run_commands(self) -> bool:
        """Runs what other threads asked for, waiting when idle; False when closed."""
        while True:
            try:
                command = self._commands.get(block=self._is_idle())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _find(self, handle: Handle) -> Sequence | None:
        return next((s for s in self._sequences() if s.handle is handle), None)

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
        old, self._version = self._version, version
        try:
            self._replace_weights(tensors)
        except Exception:
            self._version = old
            raise

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request with an event and lets go of it."""
        sequence.end(reason, self._version, error)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Lets go of a request whose last event is out."""
        self._drop(sequence)
        self._num_finished += 1
        self._num_failed += sequence.has_failed
