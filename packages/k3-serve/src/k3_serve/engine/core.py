"""The engine: one thread that plans a step, runs it, and hands out the tokens (report 5.4).

It satisfies `k3_core.engine.Engine`. A request that cannot go on ends alone; one that made a
step fail is found by running the step's requests one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from k3_core.cache.base import state_dtype
from k3_core.engine.drawing import draw, score_prompt
from k3_core.engine.protocol import EngineBusy, Images
from k3_core.engine.runner import rows_of_images
from k3_core.engine.sequence import Sequence
from k3_core.engine.threaded import ThreadedEngine
from k3_serve.cache.index import PrefixIndex
from k3_serve.cache.keys import seed_key
from k3_serve.cache.pages import PagePool
from k3_serve.cache.tiers import ThreadWorker, Worker, open_tiers, space_of
from k3_serve.engine.classes import CLASSES, Admission, RequestClass, classify
from k3_serve.engine.plan import StepPlan
from k3_serve.engine.request import RequestState
from k3_serve.engine.restores import Restores
from k3_serve.engine.rows import end_of_images, rows_and_images
from k3_serve.engine.runner import PagedRunner, RequestFault, StepLogits
from k3_serve.engine.scheduler import Scheduler
from k3_serve.engine.stats import CacheStats, stats_of
from k3_serve.observer import Observer, Silent
from k3_serve.spec import MAX_REQUESTS, Drafter, Speculation, make_drafter

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.model.batch import SequenceBatch
    from k3_core.tokenizer import K3Tokenizer

DISK_BYTES = 10 << 30
"""Default bound of the files of a cache folder."""
EXPECTED_OUTPUT = 512
"""Tokens of output that a queued request is taken to need at most."""


class ContinuousEngine(ThreadedEngine):
    """`Engine` over a paged cache with prefix reuse.

    `unit` tokens are the grain of prefix hits, `page_tokens` (a multiple) that of memory.
    `cache_bytes` None takes 1 GiB on a CPU and 80% of the free memory of a GPU; `num_pages`
    overrides it. A forward has at most `token_budget` rows: the fewest at which prefill is fast,
    since that is how long a short request waits for the step that runs (None takes 256 on a CPU
    and 4096 on a GPU). `draft` names one of `k3_serve.spec.DRAFTS`, or is one: up to `draft_tokens`
    guessed tokens a request are verified in a step while at most `draft_max_requests` decode. What
    the arena evicts goes to `cpu_cache_bytes` of host memory and from there to files in the folder
    `disk_cache`, of `disk_cache_bytes` at most; see `cache.tiers`.
    """

    _worker: Callable[[str, int], Worker] = ThreadWorker

    def __init__(
        self,
        model: K3ForConditionalGeneration,
        tokenizer: K3Tokenizer | None = None,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        unit: int = 64,
        page_tokens: int | None = None,
        num_pages: int | None = None,
        cache_bytes: int | None = None,
        cpu_cache_bytes: int = 0,
        disk_cache: Path | None = None,
        disk_cache_bytes: int = DISK_BYTES,
        token_budget: int | None = None,
        classes: tuple[RequestClass, ...] = CLASSES,
        version: int = 0,
        observer: Observer | None = None,
        draft: str | Drafter | None = None,
        draft_tokens: int = 4,
        draft_max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._observer = observer or Silent()
        if isinstance(draft, str):
            draft = make_drafter(draft, model, max_batch)
        self._speculation = Speculation(
            draft, self._observer, num_tokens=draft_tokens, max_requests=draft_max_requests
        )
        self._runner = PagedRunner(model, page_tokens or unit)
        self._unit, self._classes, self._num_slots = unit, classes, max_batch
        if token_budget is None:
            token_budget = 4096 if model.device.type == "cuda" else 256
        self._token_budget = max(token_budget, max_batch + unit)
        layout = self._runner.layout
        size = _default_bytes(model.device) if cache_bytes is None else cache_bytes
        self._num_pages = size // layout.page_bytes if num_pages is None else num_pages
        self._tiers = open_tiers(
            model,
            layout,
            unit,
            (cpu_cache_bytes, disk_cache, disk_cache_bytes),
            self._observer,
            self._worker,
        )
        self._scheduler = self._new_scheduler()
        text = model.config.text
        length = min(max_length or 1 << 62, text.max_position_embeddings)
        length = min(length, self._scheduler.max_length)
        if length < 2:
            raise ValueError(
                f"{self._num_pages} pages of {layout.page_tokens} tokens hold no request beside "
                f"two checkpoints of {layout.checkpoint_pages} pages; give the cache more memory"
            )
        super().__init__(tokenizer, text.vocab_size, length, version)
        self._admission = Admission(classes)
        self._states: dict[Sequence, RequestState] = {}
        self._by_state: dict[RequestState, Sequence] = {}
        self._is_asleep = self._is_held_up = False
        self._runner.open(self._num_pages, max_batch, length)
        self._start()

    def close(self) -> None:
        super().close()
        if self._tiers is None:
            return
        if self._tiers.has_files and not self._is_asleep:
            index = self._scheduler.index
            with torch.inference_mode():  # all that is idle goes down, as if it were evicted
                index.release(index.allocate(index.pool.num_free + index.pool.num_cached))
        self._tiers.close()

    def _reset(self) -> None:
        for state in self._states.values():
            self._leave_queue(state)
            self._speculation.forget(state)
        self._states.clear()
        self._by_state.clear()
        self._speculation.reset()
        self._cancel_restores()
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        layout = self._runner.layout
        index = PrefixIndex(
            PagePool(self._num_pages), self._unit, layout.page_tokens, layout.checkpoint_pages
        )
        kind = self._runner.model.device.type
        scheduler = Scheduler(index, self._num_slots, self._token_budget, self._classes, kind)
        self._restores: Restores | None = None
        if (tiers := self._tiers) is not None:
            index.on_evict = lambda event: tiers.write_back(self._runner.cache.arena, event)
            self._restores = Restores(
                tiers, index, lambda: self._runner.cache.arena, self._post, self._observer
            )
            scheduler.restore = self._restores.begin
        return scheduler

    def _post(self, command: Callable[[], None]) -> None:
        """Has the engine's thread run a command; from any thread, after the end too."""

        def run() -> None:
            self._is_held_up = False
            command()

        self._commands.put(run)

    # Called from any thread.

    def cache_stats(self) -> CacheStats:
        """Pages and counters now; they may lag by the running step."""
        num_restoring = 0 if self._restores is None else self._restores.num_waiting
        return stats_of(self._scheduler, num_restoring, self._tiers)

    def prepare(self) -> None:
        """Compiles what a decode step runs, so that no request waits for it."""
        self._call(self._runner.prepare)

    def sleep(self) -> None:
        """Frees the cache and pauses the requests until `wake`; the weights stay."""
        self._call(self._sleep)

    def wake(self) -> None:
        """Allocates the cache again; the requests go on by computing their rows again."""
        self._call(self._wake)

    # What the base class asks for.

    def _num_image_rows(self, images: Images | None) -> int:
        return sum(rows - 1 for rows in rows_of_images(self._runner.model.config, images))

    def _sequences(self) -> list[Sequence]:
        return list(self._states)

    def _counts(self) -> tuple[int, int]:
        return self._scheduler.counts

    def _is_idle(self) -> bool:
        return self._is_asleep or self._is_held_up or not self._states

    def _prepare(self, sequence: Sequence) -> Callable[[], None]:
        request = sequence.request
        model = self._runner.model.config
        rows, images = rows_and_images(sequence.ids, request.images, model)
        kind = classify(len(rows), request.request_class, self._classes).name
        cost = len(rows) + min(sequence.max_tokens, EXPECTED_OUTPUT)
        state = RequestState(
            sequence.handle.request_id,
            rows,
            kind,
            priority=request.priority,
            images=images,
            images_end=end_of_images(rows, images, model),
            num_head=min([request.num_head_tokens, *(row for row, _ in images)]),
            can_hit=not sequence.needs_prompt_logprobs,
            cost=cost,
            submitted=time.monotonic(),
        )
        try:
            self._admission.enter(kind, cost)
        except EngineBusy:
            labels = {"class": kind, "reason": "queue"}
            self._observer.count("k3_admission_rejected_total", 1, labels)
            raise
        return lambda: self._enqueue(sequence, state)

    def _enqueue(self, sequence: Sequence, state: RequestState) -> None:
        self._is_held_up = False
        state.seed = self._seed(sequence)
        self._states[sequence], self._by_state[state] = state, sequence
        self._scheduler.add(state)

    def _drop(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence)
        del self._by_state[state]
        self._is_held_up = False
        if state.is_restoring and self._restores is not None:
            self._restores.leave(state)
        self._scheduler.remove(state)
        self._speculation.forget(state)
        self._leave_queue(state)

    def _replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._runner.update_weights(tensors)
        self._cancel_restores()
        self._requeue_all()
        self._scheduler.index.invalidate_all()
        if self._tiers is not None:
            self._tiers.forget(
                lambda: space_of(self._runner.layout, self._runner.model, self._unit)
            )

    # Called from the engine's thread.

    def _cancel_restores(self) -> None:
        self._is_held_up = False
        if self._restores is not None:
            self._restores.cancel_all()

    def _requeue_all(self) -> None:
        """Every request starts over, under keys of the present version."""
        self._speculation.reset()
        for sequence, state in self._states.items():
            if state.is_running:
                self._scheduler.preempt(state)
            state.restart(self._seed(sequence))

    def _sleep(self) -> None:
        if self._is_asleep:
            return
        self._cancel_restores()
        self._requeue_all()
        old, self._scheduler = self._scheduler, self._new_scheduler()
        for state in old.requests:
            self._scheduler.add(state)
        self._is_asleep = True
        self._runner.close()

    def _wake(self) -> None:
        if self._is_asleep:
            self._runner.open(self._num_pages, self._num_slots, self._max_length)
            self._is_asleep = False

    def _step(self) -> None:
        begin = time.perf_counter()
        self._speculation.propose(self._by_state, self._unit)
        plan = self._scheduler.schedule()
        if not plan.slices:  # until a restore gives up its pages
            self._scheduler.fail(plan, are_suspect=False)
            self._is_held_up = True
            return
        self._note_admitted(plan)
        planned = time.perf_counter()
        logits = self._try_run(plan)
        if logits is None:
            return
        computed = time.perf_counter()
        self._finish_step(plan, logits)
        self._report(plan, begin, planned, computed)

    def _try_run(self, plan: StepPlan) -> StepLogits | None:
        """Runs the plan; None when it raised, with the request at fault ended if it is known."""
        try:
            return self._runner.run(plan, self._by_state, self._speculation.needs_hidden)
        except RequestFault as fault:
            self._scheduler.fail(plan, are_suspect=False)
            self._end_with(fault.request, fault.__cause__ or fault)
        except Exception as error:
            self._scheduler.fail(plan)
            if not self._speculation.blame(plan) and len(plan.slices) == 1:
                self._end_with(plan.slices[0].request, error)
        return None

    def _report(self, plan: StepPlan, begin: float, planned: float, computed: float) -> None:
        end = time.perf_counter()
        rate = plan.num_tokens / (end - begin)
        average = self._admission.tokens_per_second or rate
        self._admission.tokens_per_second = 0.9 * average + 0.1 * rate
        times = {"plan": planned - begin, "forward": computed - planned, "finish": end - computed}
        for phase, seconds in times.items():
            self._observer.observe("k3_step_seconds", seconds, {"phase": phase})
        self._observer.observe("k3_step_tokens", plan.num_tokens)

    def _note_admitted(self, plan: StepPlan) -> None:
        for state in plan.admitted:
            sequence = self._by_state[state]
            sequence.forget_cache()
            if state.cost:
                self._leave_queue(state)
                self._num_prompt_tokens += sequence.handle.num_prompt_tokens
                hit = sequence.handle.num_cached_tokens = state.num_cached or 0
                report = {"mla_match": state.num_latent, "state_hit": hit}
                sequence.handle.cache_report.update(report)
                if state.restored is not None:
                    sequence.handle.cache_report.update(state.restored.report())
                waited = time.monotonic() - state.submitted
                self._observer.observe("k3_queue_seconds", waited, {"class": state.request_class})

    def _leave_queue(self, state: RequestState) -> None:
        self._admission.leave(state.request_class, state.cost)
        state.cost = 0

    def _end_with(self, state: RequestState, error: BaseException) -> None:
        self._finish(self._by_state[state], "error", f"{type(error).__name__}: {error}")

    def _finish_step(self, plan: StepPlan, logits: StepLogits) -> None:
        """Draws, then lets the scheduler register and the ended requests go."""
        for one in plan.slices:
            sequence = self._by_state[one.request]
            if one.request in logits.prompts:
                scores = score_prompt(sequence, logits.prompts[one.request], one.start)
                sequence.prompt_logprobs += scores
            if one.wants_logits and not sequence.is_prefilled:
                sequence.end_prefill()
        wanting = [one for one in plan.slices if one.wants_logits]
        drawn = self._speculation.draw(wanting, self._by_state, logits.next_BV, self._draw)
        if logits.batch is not None:
            self._accept(plan, logits.batch, drawn)
        failed = [state for state in drawn if self._by_state[state].has_failed]
        tokens = {state: span[-1] for state, span in drawn.items() if span}
        accepted = {state: span[:-1] for state, span in drawn.items()}
        self._scheduler.complete(plan, tokens, failed, accepted)
        for state in drawn:
            if self._by_state[state].is_ended:
                self._release(self._by_state[state])
        self._speculation.observe(plan, logits.mix_TD)

    def _accept(
        self, plan: StepPlan, batch: SequenceBatch, drawn: dict[RequestState, list[int]]
    ) -> None:
        """The rows that count are those in front of each drawn token."""
        begin = time.perf_counter()
        counts = [one.num_kept(drawn.get(one.request, [])) for one in plan.decodes]
        self._runner.accept(plan, batch, counts)
        self._observer.observe("k3_spec_replay_seconds", time.perf_counter() - begin)

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        """One token for each sequence."""
        drawn = draw(sequences, logits_BV, self._version)
        self._num_generated_tokens += drawn.num_tokens
        if drawn.num_unsound:
            self._observer.count("k3_nan_rows_total", drawn.num_unsound)

    def _seed(self, sequence: Sequence) -> bytes:
        dtype = self._runner.layout.dtype
        kept = f"{state_dtype(dtype)}, {dtype}"
        return seed_key(self._version, sequence.request.cache_salt, kept)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    return 1 << 30
