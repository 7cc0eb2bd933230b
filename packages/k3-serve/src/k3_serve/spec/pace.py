"""How many tokens to draft for one request, from what became of its last drafts."""

from __future__ import annotations

MAX_PAUSE = 64
"""Steps. A useless draft then costs one row in 65 steps; text that turns regular is noticed within
as many tokens."""


class Pace:
    """Doubles after a full success, follows the accepted length, halves down to pauses.

    After a draft of one token that failed comes a pause of 1, 2, 4, ... steps, then a probe.
    """

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._pause, self._next_pause = 0, 1

    def limit(self) -> int:
        """Tokens to draft in this step; call it once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def stop(self) -> None:
        """No more drafts."""
        self._length = 0

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Takes the outcome of a draft of at least one token."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length, self._most)
        elif num_accepted:
            self._length = min(num_accepted + 1, self._most)
        elif self._length > 1:
            self._length //= 2
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        if num_accepted:
            self._next_pause = 1
