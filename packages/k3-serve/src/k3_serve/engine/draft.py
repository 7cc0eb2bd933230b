"""A step while it is planned: requests may still be taken out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3_serve.cache.records import Checkpoint
from k3_serve.engine.plan import Restore, Save, Slice, StepPlan
from k3_serve.engine.request import RequestState


@dataclass
class Draft:
    """Slices and copies by request, in the order in which they were planned."""

    saves: list[Save] = field(default_factory=list)
    _starts: dict[RequestState, int] = field(default_factory=dict)
    _stops: dict[RequestState, int] = field(default_factory=dict)
    _decodes: dict[RequestState, None] = field(default_factory=dict)
    _restored: dict[RequestState, Checkpoint | None] = field(default_factory=dict)
    _copies: dict[RequestState, tuple[int, int]] = field(default_factory=dict)
    _preempted: dict[RequestState, None] = field(default_factory=dict)
    _drafted: dict[RequestState, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Rows planned so far."""
        return sum(stop - self._starts[request] for request, stop in self._stops.items())

    def stop_of(self, request: RequestState) -> int:
        """Rows of the request that are computed after the step."""
        return self._stops.get(request, request.num_computed)

    def put(self, request: RequestState, stop: int) -> None:
        """Plans the request's rows up to `stop`."""
        start = self._starts.setdefault(request, request.num_computed)
        self._stops[request] = stop
        if stop - start == 1 and start > 0:
            self._decodes[request] = None
        else:
            self._decodes.pop(request, None)

    def verify(self, unit: int, room: int) -> None:
        """Adds to the decodes what was drafted for them, up to `room` rows in all.

        A span ends with its unit at the latest, where a state may have to be saved; so it needs
        no further page either.
        """
        for request in self._decodes:
            ids = request.draft[: min(request.room_in_unit(unit), room)]
            if ids and self._stops[request] == len(request.rows):
                self._drafted[request] = ids
                self._stops[request] += len(ids)
                room -= len(ids)

    def admit(self, request: RequestState, checkpoint: Checkpoint | None) -> None:
        """Plans to fill the request's slot, from a claimed checkpoint or empty."""
        self._restored[request] = checkpoint

    def copy_page(self, request: RequestState, source: int, destination: int) -> None:
        """Plans a copy of a claimed page."""
        self._copies[request] = (source, destination)

    def drop(self, request: RequestState) -> tuple[tuple[int, ...], Checkpoint | None]:
        """Calls off everything for the request; the page and checkpoint to release."""
        self._starts.pop(request, None)
        self._stops.pop(request, None)
        self._decodes.pop(request, None)
        self._drafted.pop(request, None)
        checkpoint = self._restored.pop(request, None)
        source = self._copies.pop(request, None)
        self._preempted[request] = None
        return (() if source is None else source[:1]), checkpoint

    def has_save(self, key: bytes) -> bool:
        """Whether the state of this prefix is going to be saved."""
        return any(save.key == key for save in self.saves)

    @property
    def slices(self) -> list[Slice]:
        """Decodes, then prefills."""
        first = [r for r in self._stops if r in self._decodes]
        rest = [r for r in self._stops if r not in self._decodes]
        return [self._slice(request) for request in (*first, *rest)]

    def _slice(self, request: RequestState) -> Slice:
        start, stop = self._starts[request], self._stops[request]
        drafted = self._drafted.get(request, ())
        is_last = stop - len(drafted) == len(request.rows)
        return Slice(request, start, stop, request.slot, request.pages, is_last, drafted)

    def plan(self, slices: list[Slice]) -> StepPlan:
        """The finished step of these slices, which are the draft's."""
        restores = tuple(
            Restore(r.slot, None if c is None else c.extent, r.num_computed)
            for r, c in self._restored.items()
        )
        return StepPlan(
            restores=restores,
            page_copies=tuple(self._copies.values()),
            decodes=tuple(slices[: len(self._decodes)]),
            prefills=tuple(slices[len(self._decodes) :]),
            saves=tuple(self.saves),
            admitted=tuple(self._restored),
            preempted=tuple(self._preempted),
        )
