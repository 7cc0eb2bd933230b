"""Block sizes of the decode kernels, by shape.

Legend: B rows, H heads, K, V channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_kernels.kda_chunk.config import block_width
from k3_kernels.tuning import tuned


@dataclass(frozen=True)
class StepBlocks:
    """values: state rows that a program holds at a time; warps: of a program."""

    values: int
    warps: int


def choose_step_blocks(num_k: int, num_v: int) -> StepBlocks:
    """Launch parameters of kda_step and kda_replay, those tuned on this GPU before the default."""
    return tuned("kda_step", (num_k, num_v), default_step_blocks(num_k, num_v))


def default_step_blocks(num_k: int, num_v: int) -> StepBlocks:
    """32 state values a thread.

    Two-warp programs of 16 rows leave the tail of a launch finer than larger ones: 211 us against
    216 us with 32 rows at B = 64, H = 96 on an H200.
    """
    values = min(16, block_width(num_v))
    return StepBlocks(values, warps_for(values * block_width(num_k), 32))


def choose_decode_blocks(num_k: int, num_v: int, num_states: int) -> StepBlocks:
    """Launch parameters of kda_decode's one kernel; `num_states` is rows x heads, one program each.

    One program a multiprocessor or less: as much of a state as 16 warps hold. More: small blocks,
    so that several programs share a multiprocessor and one's loads overlap another's arithmetic.
    """
    width = block_width(num_k)
    values = min(16384 // width if num_states <= 192 else 32, block_width(num_v))
    return StepBlocks(values, warps_for(values * width, 32))


def warps_for(num_values: int, values_per_thread: int) -> int:
    """Warps (1 to 16, a power of two) that leave a thread about `values_per_thread` values."""
    threads = num_values // values_per_thread
    return max(1, min(16, threads // 32))
