"""The next step's batches are read while the device works on this step's."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `read(step)` one step ahead in a thread; results do not depend on it."""

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="k3-batches")
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """The value of `step`; reading `step + 1` is started."""
        if self._ahead is not None and self._ahead[0] == step:
            value = self._ahead[1].result()
        else:
            value = self._read(step)
        self._ahead = (step + 1, self._pool.submit(self._read, step + 1))
        return value

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._pool.shutdown(cancel_futures=True)
