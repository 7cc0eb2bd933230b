"""Times of several functions in one run, taken in turns: what slows the machine slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]

MIN_ROUNDS, MAX_ROUNDS = 3, 50


def medians(runs: Mapping[str, Run], device: str, budget: float) -> dict[str, float]:
    """Median seconds of each function.

    Every round calls each of them once. There are as many rounds as fit `budget` seconds, at least
    three and at most fifty, after two that warm up.
    """
    once = _cuda_seconds if device.startswith("cuda") else _cpu_seconds
    for _ in range(2):
        warm = sum(once(run) for run in runs.values())
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(budget / max(warm, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(once(run))
    return {name: statistics.median(values) for name, values in times.items()}


def _cpu_seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Run) -> float:
    """Between two events on the stream; what the host takes to launch is part of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)
