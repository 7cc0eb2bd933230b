"""What `k3 kernels tune` tries for kda_step: one token of many rows, states of the usual sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from k3_core.testing.values import Call, Values
from k3_kernels.bench.cases import SIZES, Sizes, bench_cases
from k3_kernels.kda_step.config import StepBlocks, default_step_blocks, step_class
from k3_kernels.kda_step.op import kda_step
from k3_kernels.tuning import Sweep


def sweeps(device: str = "cuda", sizes: Sizes = SIZES["cuda"]) -> Iterator[Sweep]:
    """One shape class for each head dimension."""
    for dim in (64, 128):
        cases = bench_cases(device, "kda_step", replace(sizes, head_dim=dim))
        case = next(case for case in cases if case.name == "rows")
        call = case.make(Values(torch.bfloat16, device))
        num_states = call.args[0].shape[0] * call.args[0].shape[2]
        default = default_step_blocks(dim, dim, num_states)
        others = [StepBlocks(values, warps) for values in (8, 16, 32, 64) for warps in (1, 2, 4, 8)]
        candidates = (default, *(blocks for blocks in others if blocks != default))
        yield Sweep(step_class(dim, dim, num_states), candidates, _run(call))


def _run(call: Call) -> Callable[[StepBlocks], object]:
    return lambda blocks: kda_step(*call.args, **call.kwargs, blocks=blocks)
