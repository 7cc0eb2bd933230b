"""SIGTERM and Ctrl-C ask a run to stop after the step it is in; a second Ctrl-C kills it."""

import signal
import threading
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context manager; `name` is the signal that asked to stop, empty as long as none did.

    Outside the main thread no handler can be installed and nothing asks to stop.
    """

    def __init__(self) -> None:
        self.name = ""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
