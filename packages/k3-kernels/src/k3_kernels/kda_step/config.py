"""Block sizes of the decode kernels; predictions until a run on the H200 replaces them.

Legend: B rows, H heads, K, V channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_kernels.kda_chunk.config import block_width


@dataclass(frozen=True)
class StepBlocks:
    """values: state rows of a program; warps: such that a thread holds 16 to 32 state values."""

    values: int
    warps: int


def choose_step_blocks(num_k: int, num_v: int, num_states: int) -> StepBlocks:
    """Launch parameters of kda_step; `num_states` is rows x heads.

    Few states (one row at H = 96) are cut finer, so that every multiprocessor has work; many are
    not, because each block repeats the gate and the norms of its K channels.
    """
    values = min(16 if num_states <= 192 else 32, block_width(num_v))
    return StepBlocks(values, warps_for(values * block_width(num_k), 32))


def warps_for(num_values: int, values_per_thread: int) -> int:
    """Warps (1, 2, 4 or 8) that leave a thread about `values_per_thread` values."""
    threads = num_values // values_per_thread
    return max(1, min(8, threads // 32))
