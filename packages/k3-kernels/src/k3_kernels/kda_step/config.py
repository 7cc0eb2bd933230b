"""Block sizes of the decode kernels, by shape.

Legend: B rows, H heads, K, V channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_kernels.kda_chunk.config import block_width
from k3_kernels.tuning import tuned

ONE_WAVE = 192
"""States that an H200 starts at once as programs of several warps each."""
FEW_STATES = 1536
"""States of which a launch's tail is a large part."""


@dataclass(frozen=True)
class StepBlocks:
    """values: state rows that a program holds at a time; warps: of a program."""

    values: int
    warps: int


def choose_step_blocks(num_k: int, num_v: int, num_states: int) -> StepBlocks:
    """Launch parameters of kda_step and kda_replay, those tuned on this GPU before the default;
    `num_states` is rows x heads."""
    default = default_step_blocks(num_k, num_v, num_states)
    return tuned("kda_step", step_class(num_k, num_v, num_states), default)


def step_class(num_k: int, num_v: int, num_states: int) -> tuple[int, int, str]:
    """What shares a tuned launch."""
    return num_k, num_v, "few" if num_states <= FEW_STATES else "many"


def default_step_blocks(num_k: int, num_v: int, num_states: int) -> StepBlocks:
    """Blocks of 16 state rows: they leave the tail of a launch finer than larger ones.

    On an H200 with H = 96: at B = 64 211 us with 2 warps, 216 us with 32 rows and 4 warps; at
    B = 8 27.7 us with 1 warp, 30.6 us with 2.
    """
    values = min(16, block_width(num_v))
    per_thread = 64 if ONE_WAVE < num_states <= FEW_STATES else 32
    return StepBlocks(values, warps_for(values * block_width(num_k), per_thread))


def choose_decode_blocks(num_k: int, num_v: int, num_states: int) -> StepBlocks:
    """Launch parameters of kda_decode's one kernel; `num_states` is rows x heads, one program each.

    One program a multiprocessor or less: as much of a state as 16 warps hold. More: small blocks,
    so that several programs share a multiprocessor and one's loads overlap another's arithmetic.
    """
    width, is_few = block_width(num_k), num_states <= ONE_WAVE
    values = min(16384 // width if is_few else 16, block_width(num_v))
    return StepBlocks(values, warps_for(values * width, 32 if is_few else 16))


def warps_for(num_values: int, values_per_thread: int) -> int:
    """Warps (1 to 16, a power of two) that leave a thread about `values_per_thread` values."""
    threads = num_values // values_per_thread
    return max(1, min(16, threads // 32))
