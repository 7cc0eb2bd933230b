"""How many slabs and segments packed sequences are cut into: a cost model of an H200 (report 1.6).

The scan waits for its own chain: a multiprocessor that holds two programs, all that fit, does not
take twice as long for a chunk as one that holds one. More than the card holds run in waves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

RESIDENT = 2
"""Programs that a multiprocessor holds."""


class StepCost(NamedTuple):
    """Of one chunk of 32 in all programs, in microseconds: one a multiprocessor, two in some, two
    in all; map_share: of that, in the maps of segments, which make no outputs; they have two
    programs for one."""

    solo: float
    pair: float
    full: float
    map_share: float


FORWARD = StepCost(0.95, 1.25, 1.6, 0.67)
REVERSE = StepCost(1.95, 2.0, 4.0, 0.6)
"""Of the backward's scan, which two programs share as one memory."""
FORGETS_US = 20.0
"""Of the maps where gates are fast, whatever their number."""
COMBINE_US = 4.0
"""Of one segment in the composition."""
BOUND_US = 0.002
"""Of the bound that prep makes of each chunk and head, where there are segments."""
MAX_SEGMENTS = 16
SLAB_PROGRAMS = 180
"""Programs of prep a multiprocessor in a slab, at least: 8192 tokens of 96 heads."""
MAX_SLABS = 32


def choose_slabs(lengths: tuple[int, ...], chunk: int, num_heads: int, num_sms: int) -> int:
    """Slabs of the pipeline: as many as leave prep enough programs to hide a launch. They save
    memory: 0.7 GB a slab of workspace, of which two are alive, and a few percent of time."""
    programs = sum(-(-length // chunk) for length in lengths) * num_heads
    return max(1, min(MAX_SLABS, programs // (SLAB_PROGRAMS * num_sms)))


@lru_cache(maxsize=64)
def choose_segments(
    lengths: tuple[int, ...],
    chunk: int,
    num_heads: int,
    num_blocks: int,
    num_sms: int,
    num_slabs: int = 1,
    cost: StepCost = FORWARD,
) -> int:
    """Chunks per segment that the cost model finds fastest; 0 when cutting does not pay.

    num_blocks: programs of the scan for a piece and head. Cut in s, a sequence takes a share of the
    steps with s times the programs, after the maps of all but the last of its segments and their
    composition. Whether gates are fast, and maps cost little, is not known here: half of the calls
    are taken to be so.
    """
    parts = _parts_of_a_slab(tuple(-(-length // chunk) for length in lengths), num_slabs)
    programs = num_heads * num_blocks
    best, best_us = 0, _scan_us(parts, programs, num_sms, cost)
    longest = max(parts, default=0)
    for number in range(2, min(MAX_SEGMENTS, longest) + 1):
        steps = -(-longest // number)
        runs = [min(steps, part - at) for part in parts for at in range(0, part, steps)]
        maps = [steps for part in parts for _ in range(0, part - steps, steps)]
        maps_us = cost.map_share * _scan_us(maps, 2 * programs, num_sms, cost)
        cut_us = _scan_us(runs, programs, num_sms, cost) + (maps_us + FORGETS_US) / 2
        cut_us += number * COMBINE_US + sum(parts) * num_heads * BOUND_US
        if cut_us < best_us:
            best, best_us = steps, cut_us
    return best


def _parts_of_a_slab(chunks: tuple[int, ...], num_slabs: int) -> list[int]:
    """Chunks of each part of a sequence, in the slab with the longest part."""
    size = -(-sum(chunks) // num_slabs)
    slabs: list[list[int]] = [[]]
    room = size
    for count in chunks:
        while count:
            taken = min(count, room)
            slabs[-1].append(taken)
            count, room = count - taken, room - taken
            if not room:
                slabs.append([])
                room = size
    return max(slabs, key=lambda slab: max(slab, default=0))


def _scan_us(pieces: list[int], programs_each: int, num_sms: int, cost: StepCost) -> float:
    """Of pieces of so many chunks, each of which takes so many programs."""
    if not pieces:
        return 0.0

    def step_us(programs: int) -> float:
        if programs <= num_sms:
            return cost.solo if programs else 0.0
        share = (programs - num_sms) / ((RESIDENT - 1) * num_sms)
        return cost.pair + (cost.full - cost.pair) * share

    programs, room = len(pieces) * programs_each, RESIDENT * num_sms
    waves, rest = divmod(programs, room)
    mean = sum(pieces) / len(pieces)
    waves_us = mean * (waves * cost.full + step_us(rest))
    return max(waves_us, max(pieces) * step_us(min(programs, room)))
