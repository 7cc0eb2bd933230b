"""Between the engine and a draft: who drafts, how much, and what came of it (report 5.4).

Legend: R rows of logits, V vocabulary, T rows of a forward, D model width.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3_core.engine.sequence import Sequence as Generation
from k3_core.errors import K3Error
from k3_serve.engine.plan import Slice, StepPlan
from k3_serve.engine.request import RequestState
from k3_serve.observer import Observer
from k3_serve.spec.base import Drafter, Pass
from k3_serve.spec.pace import Pace

if TYPE_CHECKING:
    from torch import Tensor

Draw = Callable[[list[Generation], "Tensor"], None]
"""Draws and emits one token for each sequence, from its row of logits."""
logger = logging.getLogger("k3_serve.spec")
MAX_REQUESTS = 4
"""Decoding requests up to which drafts are made. With few a step is bound by the reading of weights
and by overheads, so that further rows cost little; with more, rows cost what they take. On a CPU
k3-nano with the MTP layer gains a quarter at four and loses a tenth at eight (docs/serving.md)."""


@dataclass
class _Track:
    pace: Pace
    num_drafted: int = 0
    num_accepted: int = 0


class Speculation:
    """Up to `num_tokens` drafted tokens a request and step; without a drafter it does nothing.

    A drafter that raises is not asked again until the engine is made anew.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        observer: Observer,
        *,
        num_tokens: int = 4,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        if num_tokens < 1:
            raise K3Error(f"draft_tokens is {num_tokens}; give at least 1, or no draft")
        self._drafter, self._observer = drafter, observer
        self._num_tokens, self._max_requests = num_tokens, max_requests
        self._tracks: dict[RequestState, _Track] = {}
        self._is_on = False

    @property
    def needs_hidden(self) -> bool:
        """Whether `observe` reads what a forward computed, of all its rows."""
        return self._is_on and self._drafter is not None and self._drafter.needs_hidden

    def propose(self, sequences: Mapping[RequestState, Generation], unit: int) -> None:
        """Gives the decoding ones of the requests drafts for the next step.

        A draft ends where a request may end by length, and on a match unit: the state behind it
        may have to be saved there.
        """
        if self._drafter is None:
            return
        decoding = [state for state in sequences if state.is_decoding]
        self._is_on = len(decoding) <= self._max_requests
        asked = []
        for state in decoding:
            state.draft = ()
            if self._is_on:
                sequence = sequences[state]
                left = sequence.max_tokens - sequence.num_generated - 1
                room = min(left, state.room_in_unit(unit))
                if room > 0 and (limit := self._track(state).pace.limit()):
                    asked.append((state, min(limit, room)))
        if not asked:
            return
        try:
            drafts = self._drafter.propose(asked)
        except Exception as error:
            self._give_up(error)
            return
        for (state, limit), draft in zip(asked, drafts, strict=True):
            state.draft = tuple(draft[:limit])

    def draw(
        self,
        slices: Sequence[Slice],
        sequences: Mapping[RequestState, Generation],
        logits_RV: Tensor,
        draw: Draw,
    ) -> dict[RequestState, list[int]]:
        """The tokens that each slice's request gets: `draw` goes on while it draws the draft's.

        Row j of a slice's 1 + len(draft) rows of logits is what the model says after j accepted
        tokens, and `draw` the model's own way to a token: the outcome is that of single steps.
        """
        drawn: dict[RequestState, list[int]] = {one.request: [] for one in slices}
        live, first = [], 0
        for one in slices:
            live.append((one, first))
            first += 1 + len(one.draft)
            if one.draft:
                self._count(sequences[one.request], one.request, len(one.draft), 0)
        offset, is_plain = 0, first == len(slices)
        while live:
            members = [sequences[one.request] for one, _ in live]
            counts = [len(sequence.ids) for sequence in members]
            rows = [at + offset for _, at in live]
            draw(members, logits_RV if is_plain else logits_RV[rows])
            going = []
            for (one, at), sequence, count in zip(live, members, counts, strict=True):
                drawn[one.request] += sequence.ids[count:]
                is_right = one.draft[offset : offset + 1] == tuple(sequence.ids[count:])
                if is_right and one.draft[offset:] and not sequence.is_ended:
                    self._count(sequence, one.request, 0, 1)
                    going.append((one, at))
            live, offset = going, offset + 1
        for one in slices:
            if one.draft:
                num_accepted = max(len(drawn[one.request]) - 1, 0)
                self._track(one.request).pace.learn(len(one.draft), num_accepted)
        return drawn

    def _count(
        self, sequence: Generation, state: RequestState, num_drafted: int, num_accepted: int
    ) -> None:
        """Into metrics and the request's report, which is whole before its last event is out."""
        track = self._track(state)
        track.num_drafted += num_drafted
        track.num_accepted += num_accepted
        self._observer.count("k3_spec_drafted_total", num_drafted)
        self._observer.count("k3_spec_accepted_total", num_accepted)
        report = {"spec_drafted": track.num_drafted, "spec_accepted": track.num_accepted}
        # Another thread may be reading the old one.
        sequence.handle.cache_report = {**sequence.handle.cache_report, **report}

    def blame(self, plan: StepPlan) -> bool:
        """A step raised: requests whose drafts were in it draft no more; whether there are any."""
        drafted = [one.request for one in plan.decodes if one.draft]
        for state in drafted:
            self._track(state).pace.stop()
        return bool(drafted)

    def observe(self, plan: StepPlan, mix_TD: Tensor | None) -> None:
        """Shows the draft what the forward computed of the requests that go on."""
        if self._drafter is None or not self.needs_hidden:
            return
        passes, offset = [], 0
        for one in plan.slices:
            request = one.request
            if request.is_running and one.start < request.num_computed:
                passes.append(Pass(request, one.start, request.num_computed, offset))
            offset += one.num_tokens
        if not passes:
            return
        assert mix_TD is not None
        try:
            self._drafter.observe(passes, mix_TD)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The requests go on without drafts: none of them is at fault."""
        place = "".join(traceback.format_tb(error.__traceback__))
        logger.error("no more drafts after %s\n%s", type(error).__name__, place)
        self._drafter = None

    def forget(self, request: RequestState) -> None:
        """The request has ended."""
        self._tracks.pop(request, None)
        if self._drafter is not None:
            self._drafter.forget(request)

    def reset(self) -> None:
        """Other weights, a pause, or a new beginning of the engine."""
        if self._drafter is not None:
            self._drafter.reset()

    def _track(self, request: RequestState) -> _Track:
        track = self._tracks.get(request)
        if track is None:
            track = self._tracks[request] = _Track(Pace(self._num_tokens))
        return track
