"""What `k3 kernels tune` tries for kda_chunk: the blocks of the table, one field changed each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from k3_core.testing.values import Call, Values
from k3_kernels.bench.cases import SIZES, Sizes, bench_cases
from k3_kernels.kda_chunk.config import Blocks, default_blocks
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.tuning import Sweep

FIELDS = {
    "values": (32, 64, 128),
    "scan_warps": (4, 8),
    "scan_stages": (2, 3, 4),
    "prep_warps": (1, 2, 4),
    "prep_stages": (1, 2, 3),
}


def sweeps(device: str = "cuda", sizes: Sizes = SIZES["cuda"]) -> Iterator[Sweep]:
    """bfloat16 inputs, one shape class for each head dimension."""
    for dim in (64, 128):
        wide = replace(sizes, head_dim=dim)
        case = next(c for c in bench_cases(device, "kda_chunk", wide) if c.name == "packed")
        default = default_blocks(dim, is_float=False)
        changed = [
            replace(default, **{name: value}) for name, values in FIELDS.items() for value in values
        ]
        candidates = (default, *(blocks for blocks in changed if blocks != default))
        call = case.make(Values(torch.bfloat16, device))
        yield Sweep((dim, "half"), candidates, _run(call))


def _run(call: Call) -> Callable[[Blocks], object]:
    return lambda blocks: kda_chunk(*call.args, **call.kwargs, blocks=blocks)
