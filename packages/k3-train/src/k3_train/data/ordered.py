"""A parallel map that keeps the order and reads only a little ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 3
"""Tasks begun for each worker."""


def ordered_map(
    work: Callable[[T], R],
    tasks: Iterable[T],
    workers: int,
    start: Callable[..., None],
    arguments: tuple[object, ...],
) -> Iterator[R]:
    """`work(task)` for each task, in order; results do not depend on `workers`.

    `start(*arguments)` prepares the process that works. With one worker it is this one.
    """
    if workers <= 1:
        start(*arguments)
        yield from map(work, tasks)
        return
    # Started afresh rather than forked: the parent may hold threads of the BPE or of torch.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start, arguments)
    pending: deque[Future[R]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(work, task))
            if len(pending) > AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
