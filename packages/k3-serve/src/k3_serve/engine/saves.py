"""Which states a step leaves behind in the prefix cache (report 5.4): no torch."""

from __future__ import annotations

from collections.abc import Iterable

from k3_serve.cache.index import PrefixIndex
from k3_serve.cache.pages import OutOfPages
from k3_serve.engine.draft import Draft
from k3_serve.engine.plan import Save, Slice
from k3_serve.engine.request import RequestState


class Saves:
    """Plans checkpoints of running requests and registers those that were written."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index, self._unit = index, index.unit

    def plan(self, draft: Draft, slices: Iterable[Slice]) -> None:
        """Extents for the states that the step's slices pass: the wanted ones and the latest."""
        due = [(one, places) for one in slices if (places := self._places(one))]
        for one, places in sorted(due, key=lambda pair: pair[0].request.rank):
            for num_tokens in sorted(places):
                self._plan_one(draft, one, num_tokens)

    def _places(self, one: Slice) -> set[int]:
        places = {n for n in one.request.wanted if one.start < n <= one.stop}
        latest = one.stop // self._unit * self._unit
        return places | {latest} if latest > one.start else places

    def register(self, save: Save, is_good: bool) -> None:
        """The forward has written a save, unless its request failed or did not get there."""
        if not is_good or save.num_tokens > save.request.num_computed:
            self._index.release(save.extent)
            return
        is_new = self._index.register_checkpoint(save.key, save.num_tokens, save.extent, save.kind)
        if is_new and save.kind == "moving":
            self._supersede(save.request)
            save.request.moving = self._index.checkpoint_at(save.key)

    def _plan_one(self, draft: Draft, one: Slice, num_tokens: int) -> None:
        request, key = one.request, one.request.key_at(num_tokens, self._unit)
        kind = request.wanted.get(num_tokens, "moving")
        known = self._index.checkpoint_at(key)
        if known is not None:
            if known.kind == "moving":
                known.kind = kind
            return
        if draft.has_save(key):
            return
        if kind == "moving" and not one.draft:  # else it may not get there
            self._supersede(request)
        try:
            extent = tuple(self._index.allocate(self._index.checkpoint_pages))
        except OutOfPages:
            return
        draft.saves.append(Save(request, num_tokens, extent, key, kind))

    def _supersede(self, request: RequestState) -> None:
        if request.moving is not None:
            self._index.recycle(request.moving)
            request.moving = None
