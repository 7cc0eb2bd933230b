"""Timing on a CUDA device for benchmarks/kernels.py: events, graph replay, the copy rate."""

import datetime
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

WARMUP = 10
BATCH = 8
"""Rounds of calls that wait behind one another, few enough for the queue of the device."""
AHEAD_CYCLES = 30_000_000
"""Clock cycles that the device is kept busy while a batch is queued: about 17 ms."""


def run_record() -> dict[str, Any]:
    """When, where and how the figures of a file were taken."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python " + " ".join(_without_folder(word) for word in sys.argv),
    }


def _without_folder(word: str) -> str:
    """An absolute path's last part: a record names no folders of the machine that made it."""
    return Path(word).name if Path(word).is_absolute() else word


def event_us(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` single calls, each between two events, as the device sees them: gaps
    between the launches of a call count, the time in which the host queues them does not."""
    return in_turn_us([run], repeats)[0]


def in_turn_us(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The same of several calls in turn, so that they meet the card in the same state: where its
    power is capped, the clock follows what ran before."""
    for _ in range(WARMUP):
        for run in runs:
            run()
    torch.cuda.synchronize()
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for number in range(repeats):
        if number % BATCH == 0:
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD_CYCLES)
        for run, own in zip(runs, pairs, strict=True):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            run()
            pair[1].record()
            own.append(pair)
    torch.cuda.synchronize()
    return [1e3 * statistics.median(start.elapsed_time(end) for start, end in own) for own in pairs]


def graph_us(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median time of one call when all `runs`, one after another, are replayed as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return event_us(graph.replay, repeats) / len(runs)


def copy_rate() -> float:
    """Bytes a second, read and written, of a large device copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (event_us(lambda: target.copy_(source), 20) * 1e-6)
