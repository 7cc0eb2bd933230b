"""`k3 kernels tune`: time candidates of launch configurations and write the user's cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from k3_core.errors import K3Error, one_line
from k3_kernels.bench.clock import medians
from k3_kernels.tuning import (
    SWEEPS,
    Entry,
    Sweep,
    as_fields,
    cache_file,
    device_name,
    triton_version,
    write_cache,
)

BUDGET = 0.5
"""Seconds that the candidates of one shape class are timed for."""
NUM_CALLS = 20
"""Launches in one replay of a graph, so that the gap between replays does not count."""
MARGIN = 0.98
"""A candidate has to take less than this part of the default's time."""


def tune_ops(op: str | None) -> None:
    """Tune one op or all; raises K3Error without a GPU or for an op without configurations."""
    if op is not None and op not in SWEEPS:
        raise K3Error(f"{op} has no launch configurations to tune; those with: {', '.join(SWEEPS)}")
    name = device_name()
    if name is None:
        raise K3Error(
            "`k3 kernels tune` times launches on a GPU, and torch finds no CUDA device here; on a "
            "CPU nothing is tuned (`k3 kernels bench --device cpu` compares what there is)"
        )
    if triton_version() is None:
        raise K3Error("`k3 kernels tune` needs triton, which is not installed: pip install triton")
    path = cache_file(name)
    write_cache(path, name, entries([op] if op else list(SWEEPS)))
    print(f"written to {path}")


def entries(ops: list[str]) -> Iterator[Entry]:
    """The measured entry of each shape class of each op, printed as it comes."""
    for op in ops:
        module, _, attribute = SWEEPS[op].partition(":")
        for sweep in getattr(importlib.import_module(module), attribute)():
            entry = fastest(op, sweep)
            print(
                f"{op} {list(entry.shape)}: {entry.config}, {entry.microseconds:.1f} us "
                f"(default {entry.default_microseconds:.1f} us)",
                flush=True,
            )
            yield entry


def fastest(op: str, sweep: Sweep) -> Entry:
    """The fastest candidate, or the default where none is clearly faster.

    A candidate that the device has no room for is left out with a line that says so; the default
    has to run.
    """
    replays = {}
    for number, config in enumerate(sweep.candidates):
        try:
            replays[str(number)] = captured(partial(sweep.run, config))
        except (RuntimeError, ValueError) as error:
            if number == 0:
                raise
            print(f"{op} {list(sweep.shape)}: {as_fields(config)} left out, {one_line(error)}")
    seconds = medians(replays, "cuda", BUDGET)
    best = min(seconds, key=lambda number: seconds[number])
    if seconds[best] > MARGIN * seconds["0"]:
        best = "0"
    return Entry(
        op=op,
        shape=sweep.shape,
        config=as_fields(sweep.candidates[int(best)]),
        microseconds=1e6 * seconds[best] / NUM_CALLS,
        default_microseconds=1e6 * seconds["0"] / NUM_CALLS,
    )


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A function that replays `NUM_CALLS` calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            run()
    replay: Callable[[], object] = graph.replay
    return replay
