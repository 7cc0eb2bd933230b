"""Which rows of which requests the next step computes, and what is copied around it (report 5.4).

Pure Python over `PrefixIndex`: everything here is tested without a model. A step goes through
`schedule` (claim hits, allocate, plan copies), the forward, and `complete` (register what was
written, append tokens, release). Nothing is registered before its bytes are written.

- Running requests whose prompt is computed decode one token each, first.
- The rest of the step's token budget goes to prompts, by deficit round robin over the classes
  (`Shares`); a chunk ends on a match unit unless it is a prompt's last.
- When pages run out, the request of lowest priority, youngest first, waits again. Its pages and
  its latest checkpoint stay in the index, so that it resumes as an ordinary hit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from k3_serve.cache.index import PrefixIndex
from k3_serve.cache.pages import OutOfPages
from k3_serve.cache.records import Match
from k3_serve.engine.classes import CLASSES, DeficitRoundRobin, RequestClass, Shares
from k3_serve.engine.draft import Draft
from k3_serve.engine.plan import StepPlan
from k3_serve.engine.request import RequestState
from k3_serve.engine.saves import Saves

PATIENCE = 64
"""Steps in which a request may be passed over before nobody else is admitted in front of it."""


class Scheduler:
    """Owns the queue, the slots and, through the index, the pages.

    `token_budget` bounds the rows of a forward and leaves room for a unit of prompt when all
    slots decode. On a `device` of that kind ("cpu" or "cuda") deep rows of prompts are dear.
    """

    def __init__(
        self,
        index: PrefixIndex,
        num_slots: int,
        token_budget: int,
        classes: tuple[RequestClass, ...] = CLASSES,
        device: str = "cpu",
    ) -> None:
        if token_budget < num_slots + index.unit:
            raise ValueError(
                f"token_budget is {token_budget}; with {num_slots} slots and units of "
                f"{index.unit} tokens it is at least {num_slots + index.unit}"
            )
        self.index, self.token_budget = index, token_budget
        self._saves = Saves(index)
        self.num_preemptions, self._unit, self._page_tokens = 0, index.unit, index.page_tokens
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._max_slots = {c.name: max(1, int(c.slot_share * num_slots)) for c in classes}
        self._weights = {c.name: c.weight for c in classes}
        self._round_robin = DeficitRoundRobin(self._weights, index.unit, token_budget)
        self._shares = Shares(self._weights, token_budget, index.unit, device)
        self._waiting: dict[RequestState, None] = {}
        self._running: dict[RequestState, None] = {}
        self.restore: Callable[[RequestState, Match], bool] | None = None
        """Begins to bring up a longer prefix than the match; the request `is_restoring` then."""
        self._arrivals = itertools.count()
        self._starving: RequestState | None = None

    @property
    def max_length(self) -> int:
        """The longest sequence that always fits when it is alone.

        Beside its own pages it needs an extent to resume from, one to save to, and a copied page.
        """
        reserve = 2 * self.index.checkpoint_pages + 1
        return (self.index.pool.num_pages - reserve) * self._page_tokens

    @property
    def requests(self) -> list[RequestState]:
        """All that have not ended."""
        return [*self._running, *self._waiting]

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of waiting and of running requests."""
        return len(self._waiting), len(self._running)

    # Requests

    def add(self, request: RequestState) -> None:
        """Queues a request."""
        request.arrival = next(self._arrivals)
        request.num_prompt = len(request.rows)
        self._waiting[request] = None

    def remove(self, request: RequestState) -> None:
        """Takes a request out between two steps: ended, aborted or suspended.

        What it computed stays in the index; its latest checkpoint becomes that of a turn.
        """
        if request.moving is not None and request.moving.is_alive:
            request.moving.kind = "turn"
        if request.is_running:
            self._evacuate(request)
        else:
            del self._waiting[request]

    def preempt(self, request: RequestState) -> None:
        """Sends a running request back to the queue, between two steps."""
        self._evacuate(request)
        self._waiting[request] = None
        self.num_preemptions += 1

    def _evacuate(self, request: RequestState) -> None:
        """Frees the slot and the pages of a running request."""
        del self._running[request]
        self._free_slots.append(request.slot)
        self.index.release(request.pages)
        moving = request.moving
        request.abandon()
        request.moving = moving  # it is still in the index, for the resumption

    # A step

    def schedule(self) -> StepPlan:
        """The next step. Empty only when no request is left, or while restores hold pages."""
        draft = Draft()
        self._starving = min(
            (r for r in self._waiting if r.num_refusals >= PATIENCE and not r.is_restoring),
            key=lambda r: r.rank,
            default=None,
        )
        present: set[str] = set()
        if suspect := next((r for r in self.requests if r.is_suspect), None):
            self._plan_alone(draft, suspect)
        else:
            self._plan_decodes(draft)
            present = self._plan_prefills(draft)
        slices = draft.slices
        self._shares.settle(slices, present)
        self._saves.plan(draft, slices)
        return draft.plan(slices)

    def _plan_alone(self, draft: Draft, request: RequestState) -> None:
        """A step of one request, for which all others make room if they must."""
        if not self._try_alone(draft, request):
            for other in [r for r in self._running if r is not request]:
                self._preempt_in(draft, other)
            self._try_alone(draft, request)

    def _try_alone(self, draft: Draft, request: RequestState) -> bool:
        is_ready = request.is_running or self._admit(draft, request, is_urgent=True)
        return is_ready and bool(self._extend(draft, request, self.token_budget))

    def _plan_decodes(self, draft: Draft) -> None:
        for request in sorted(self._running, key=lambda r: r.rank):
            if request.is_decoding and self._grow(draft, request, len(request.rows)):
                draft.put(request, len(request.rows))
        draft.verify(self._unit, self.token_budget - self._unit - draft.num_tokens)

    def _plan_prefills(self, draft: Draft) -> set[str]:
        """Prompts, within the rooms of their classes; the classes that have requests."""
        queues = self._queues()
        present = {r.request_class for r in self._running} | queues.keys()
        rooms = self._shares.rooms(present, {n: q[-1].num_computed for n, q in queues.items()})
        for name in self._max_slots.keys() - queues.keys():
            self._round_robin.clear(name)
        self._plan_rounds(draft, queues, rooms)
        if not draft.num_tokens:  # those that were to come first cannot be served
            self._plan_rounds(draft, self._queues(), dict.fromkeys(rooms, self.token_budget))
        return present

    def _plan_rounds(
        self, draft: Draft, queues: dict[str, list[RequestState]], rooms: dict[str, int]
    ) -> None:
        """Grants until the budget is used or no class can use its own."""
        while queues and draft.num_tokens < self.token_budget:
            for name in self._round_robin.order(queues):
                left = min(self.token_budget - draft.num_tokens, rooms[name])
                granted = min(self._round_robin.grant(name), left)
                before = draft.num_tokens
                used, can_go_on = self._serve(draft, queues[name], granted)
                self._round_robin.spend(name, used)
                rooms[name] -= used
                if not queues[name]:
                    self._round_robin.clear(name)
                # Preemption may have given tokens back; else a rest below a unit is of no use.
                is_stuck = granted == left and draft.num_tokens >= before
                if not queues[name] or not can_go_on or is_stuck:
                    del queues[name]

    def _queues(self) -> dict[str, list[RequestState]]:
        """Requests with rows of prompt to compute by class, the next one last."""
        queues: dict[str, list[RequestState]] = {}
        unfinished = [r for r in self._running if not r.is_decoding]
        for request in sorted(
            [*unfinished, *(r for r in self._waiting if not r.is_restoring)],
            key=lambda r: (-r.priority, not r.is_running, r.arrival),
            reverse=True,
        ):
            queues.setdefault(request.request_class, []).append(request)
        return queues

    def _serve(self, draft: Draft, queue: list[RequestState], granted: int) -> tuple[int, bool]:
        """Gives a class's requests up to `granted` tokens: tokens used, and whether to go on."""
        used = 0
        while queue and granted > used:
            request = queue[-1]
            if not request.is_running and not self._admit(draft, request):
                if not request.is_restoring:
                    return used, False
                queue.pop()
                continue
            num_tokens = self._extend(draft, request, granted - used)
            if num_tokens is None:
                return used, False
            used += num_tokens
            if draft.stop_of(request) < len(request.rows):
                return used, True
            queue.pop()
        return used, True

    def _extend(self, draft: Draft, request: RequestState, limit: int) -> int | None:
        """Plans up to `limit` more rows of a prompt; None when the request lost its pages."""
        start, total = draft.stop_of(request), len(request.rows)
        stop = min(start + limit, total)
        if stop < total:
            stop = max(stop // self._unit * self._unit, start)
        if stop == start:
            return 0
        if not self._grow(draft, request, stop):
            return None
        draft.put(request, stop)
        return stop - start

    # Admission

    def _admit(self, draft: Draft, request: RequestState, is_urgent: bool = False) -> bool:
        """Gives a waiting request a slot and the pages of its hit, if there is room.

        A request of higher priority takes the room of one of lower priority. Behind one that was
        passed over for too long nobody of the same priority comes in.
        """
        first = self._starving
        if first not in (None, request) and first.priority >= request.priority and not is_urgent:
            return False
        while (match := self._find_room(request, is_urgent)) is None:
            worst = max(self._running, key=lambda r: r.rank, default=None)
            if worst is None or worst.priority >= request.priority:
                request.num_refusals += 1
                return False
            self._preempt_in(draft, worst)
        if self.restore is not None and not is_urgent and self.restore(request, match):
            return False
        self.index.claim(match)
        request.pages = list(match.pages)
        request.num_computed = match.num_tokens
        if request.num_cached is None:
            request.num_cached = match.num_tokens
            request.num_latent = match.num_latent_tokens
        request.slot, request.num_refusals = self._free_slots.pop(), 0
        del self._waiting[request]
        self._running[request] = None
        draft.admit(request, match.checkpoint)
        request.want_checkpoints(self._unit, match.junction)
        if match.copy_source is not None:
            try:
                (page,) = self.index.allocate(1)
            except OutOfPages:
                self._preempt_in(draft, request)
                return False
            draft.copy_page(request, match.copy_source, page)
            request.pages[-1] = page
        return True

    def _find_room(self, request: RequestState, is_urgent: bool) -> Match | None:
        """What the index has of a request; None when no slot is free, or when the pages do not
        suffice for all rows and the next token.

        Others that run get a page each in reserve, so that the newcomer is not sent away again
        by their next tokens.
        """
        if not self._free_slots:
            return None
        is_alone = is_urgent or not self._running
        held = sum(r.request_class == request.request_class for r in self._running)
        if not is_alone and held >= self._max_slots[request.request_class]:
            return None
        limit = len(request.rows) - 1 if request.can_hit else 0
        match = self.index.lookup(request.unit_keys(self._unit), limit)
        if is_alone:
            return match
        pinned = list(match.pages) + list(match.checkpoint.extent if match.checkpoint else ())
        pool = self.index.pool
        available = pool.num_free + pool.num_cached - sum(pool.is_cached(p) for p in pinned)
        own = self._num_pages(len(request.rows) + 1) - len(match.pages)
        promised = sum(self._num_pages(len(r.rows) + 1) - len(r.pages) + 1 for r in self._running)
        return match if available >= own + 1 + max(promised, 0) else None

    # Pages

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _grow(self, draft: Draft, request: RequestState, num_tokens: int) -> bool:
        """Gives a request the pages of `num_tokens` rows, at the expense of others if needed.

        False when the request itself had to go.
        """
        if request not in self._running:
            return False
        missing = self._num_pages(num_tokens) - len(request.pages)
        while missing > 0:
            try:
                request.pages += self.index.allocate(missing)
                return True
            except OutOfPages:
                worst = max(self._running, key=lambda r: r.rank)
                self._preempt_in(draft, worst)
                if worst is request:
                    return False
        return True

    def _preempt_in(self, draft: Draft, request: RequestState) -> None:
        """Preempts while planning: what the step was to do for the request is called off."""
        self.index.release(*draft.drop(request))
        self.preempt(request)

    # After the forward

    def complete(
        self,
        plan: StepPlan,
        tokens: Mapping[RequestState, int],
        failed: Collection[RequestState] = (),
        accepted: Mapping[RequestState, Sequence[int]] | None = None,
    ) -> None:
        """Registers what the step wrote and appends the drawn tokens, `accepted` drafts first.

        What it wrote for `failed` requests is not kept. Ended requests are removed afterwards.
        """
        for one in plan.slices:
            request, kept = one.request, (accepted or {}).get(one.request, ())
            request.rows += kept
            stop = request.num_computed = one.stop - len(one.draft) + len(kept)
            request.is_suspect = request.is_suspect and not one.wants_logits
            if request not in failed and stop // self._unit > one.start // self._unit:
                keys = request.unit_keys(self._unit)
                self.index.register_pages(keys, request.pages, stop)
        for save in plan.saves:
            self._saves.register(save, is_good=save.request not in failed)
        self._release_sources(plan)
        for request, token_id in tokens.items():
            request.rows.append(token_id)

    def fail(self, plan: StepPlan, are_suspect: bool = True) -> None:
        """The step raised: nothing was written that may be used; its requests wait again.

        Suspects run alone until their prompt is through, so that the one at fault is found.
        """
        for save in plan.saves:
            self.index.release(save.extent)
        self._release_sources(plan)
        for one in plan.slices:
            one.request.is_suspect = are_suspect
        # Also the admitted without rows in this step: their slots were not filled.
        for request in dict.fromkeys((*plan.admitted, *(one.request for one in plan.slices))):
            self.preempt(request)

    def _release_sources(self, plan: StepPlan) -> None:
        for restore in plan.restores:
            self.index.release(restore.extent or ())
        self.index.release([source for source, _ in plan.page_copies])
