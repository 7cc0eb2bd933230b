"""Block sizes and precisions of the KDA kernels: tables in Python, nothing tuned at import.

* chunk 32: half the log decays of a chunk stay inside the range of bfloat16 and float32, so one
  anchor serves all its products. A chunk of 64 needs two, and costs a warpgroup's registers.
* bfloat16 operands everywhere but in the inverse (float16, entries at most 1) keep the error below
  5e-3; the state, all sums and the gate are float32.
* float16 inputs run on float32 operands in tf32x3: bfloat16 would lose 3 of their bits, a float16
  state could overflow, and a product in tf32 cuts operands off instead of rounding them, which
  came to errors of 2e-3 in a map of 35 tokens and of 9e-3 in a gradient.
Legend: K, V channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels.tuning import tuned

LOWEST_BOUND = -5.0
"""Half of a 32-token chunk at this bound is 2^115, inside float32 and bfloat16."""
MAX_CHANNELS = 256
MIN_BLOCK = 16


@dataclass(frozen=True)
class Precision:
    """Dtypes of the operands of products; sums are always float32.

    operand: of the state, the workspace and all products with them, whose exponents need float32's
    range; sums: of the log decays; solve: inside the inverse. dot is Triton's `input_precision` of
    float32 operands, map_dot that of the sums and of the composition of segments. forget: log2 of
    the share of a state that the maps of segments may leave out (None: nothing): below the rounding
    of float32, and for 16-bit operands 2^-11 of the rounding of one of them.
    """

    operand: torch.dtype
    sums: torch.dtype
    solve: torch.dtype
    dot: str
    map_dot: str
    forget: float | None = -32.0


IEEE = Precision(torch.float32, torch.float32, torch.float32, "ieee", "ieee")
TF32X3 = Precision(torch.float32, torch.float32, torch.float32, "tf32x3", "tf32x3")
BF16 = Precision(torch.bfloat16, torch.float16, torch.float16, "tf32", "tf32x3", -20.0)

PRECISIONS = {torch.float32: IEEE, torch.float16: TF32X3, torch.bfloat16: BF16}
"""The default of each input dtype."""


@dataclass(frozen=True)
class Blocks:
    """Launch parameters of one call.

    chunk: tokens of a chunk, 16 or 32; channels: block of K in prep; values: block of V in the
    scan. prep_registers caps the registers of a thread; None: no cap.
    """

    chunk: int
    values: int
    scan_warps: int = 4
    scan_stages: int = 3
    prep_warps: int = 1
    channels: int = 32
    prep_stages: int = 4
    prep_registers: int | None = None
    combine_values: int = 16


_HALF = {
    # widest of K and V, rounded up: Blocks for two-byte operands
    16: Blocks(32, 16),
    32: Blocks(32, 32),
    64: Blocks(32, 64),
    128: Blocks(32, 64, combine_values=32),
    256: Blocks(32, 64, scan_warps=8, scan_stages=2),
}
_FLOAT = {
    16: Blocks(32, 16, scan_stages=1, prep_warps=4, prep_stages=1, channels=16),
    32: Blocks(32, 32, scan_stages=1, prep_warps=4, prep_stages=1),
    64: Blocks(32, 32, scan_stages=1, prep_warps=4, prep_stages=1),
    128: Blocks(32, 32, scan_stages=1, prep_warps=4, prep_stages=1),
    256: Blocks(16, 16, scan_stages=1, prep_warps=4, prep_stages=1),
}


def block_width(num_channels: int) -> int:
    """The power of two that holds a head dimension; raises ValueError above 256."""
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise ValueError(
            f"KDA kernels: head dimension {num_channels} is outside 1..{MAX_CHANNELS}; "
            "use kda_chunk.cpu, which takes any"
        )
    return max(MIN_BLOCK, 1 << (num_channels - 1).bit_length())


def choose_blocks(num_k: int, num_v: int, precision: Precision) -> Blocks:
    """Launch parameters for a shape, those tuned on this GPU before the table's."""
    width = max(block_width(num_k), block_width(num_v))
    is_float = precision.operand == torch.float32
    return tuned(
        "kda_chunk", (width, "float" if is_float else "half"), default_blocks(width, is_float)
    )


def default_blocks(width: int, is_float: bool) -> Blocks:
    """The table's launch parameters for the wider of K and V, as a power of two."""
    return (_FLOAT if is_float else _HALF)[width]
