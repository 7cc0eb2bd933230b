"""One call of kda_chunk on Triton: how it is cut and launched, without its gradients.

Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, E
exported states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from k3_kernels.kda_chunk.choose import choose_segments, choose_slabs
from k3_kernels.kda_chunk.config import Blocks, Precision, block_width
from k3_kernels.kda_chunk.launch import Gates, run_plan
from k3_kernels.kda_chunk.plan import make_plan
from k3_kernels.kda_chunk.workspace import Record


class Saves(IntEnum):
    """What a forward saves for its backward besides inputs, o and states at stretches; states are
    those of every chunk, with the deltas, and save the stretches."""

    NOTHING = 0
    TILES = 1
    TILES_AND_STATES = 2


class Inputs(NamedTuple):
    """The tensors of a call, checked; a given initial state is contiguous. Without queries there
    are no outputs, only the final state."""

    q_TGK: Tensor | None
    k_TGK: Tensor
    v_THV: Tensor
    gate_THK: Tensor
    beta_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    initial_NHVK: Tensor | None

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[H, V, K]."""
        return (*self.v_THV.shape[1:], self.k_TGK.shape[2])


@dataclass(frozen=True)
class Call:
    """What else a call is made of; None where the planner chooses.

    The last four are of the backward (backward_plan.py): stretch and reverse_chunks, of a segment
    of the reverse scan (0: uncut), in chunks; saves: what the forward saves.
    """

    lengths: tuple[int, ...]
    lower_bound: float
    scale: float
    has_final: bool
    blocks: Blocks
    precision: Precision
    segment_chunks: int | None = None
    num_slabs: int | None = None
    backward_slabs: int | None = None
    stretch: int | None = None
    reverse_chunks: int | None = None
    saves: Saves | None = None


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where kernels are only interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def run_forward(
    call: Call,
    inputs: Inputs,
    offsets: tuple[tuple[int, ...], ...],
    exports_EHVK: Tensor | None,
    record: Record | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """o and the final state; the states after `offsets` go to `exports_EHVK`, what a
    backward takes to `record`."""
    device, blocks, lengths = inputs.k_TGK.device, call.blocks, call.lengths
    num_heads, num_v = inputs.v_THV.shape[1:]
    num_blocks = -(-num_v // min(blocks.values, block_width(num_v)))
    num_sms = num_multiprocessors(device)
    num_slabs, segment_chunks = call.num_slabs, call.segment_chunks
    if num_slabs is None:
        num_slabs = choose_slabs(lengths, blocks.chunk, num_heads, num_sms)
    if segment_chunks is None:
        segment_chunks = choose_segments(
            lengths, blocks.chunk, num_heads, num_blocks, num_sms, num_slabs
        )
    plan = make_plan(lengths, blocks.chunk, segment_chunks, device, offsets, num_slabs)
    final = None
    if call.has_final or len(plan.slabs) > 1:
        shape = (len(lengths), *inputs.state_shape)
        final = torch.empty(shape, dtype=torch.float32, device=device)
    o_THV = run_plan(
        *inputs[:3],
        Gates(*inputs[3:7], call.lower_bound),
        call.scale,
        plan,
        inputs.initial_NHVK,
        final,
        exports_EHVK,
        blocks,
        call.precision,
        record,
    )
    return o_THV, final if call.has_final else None
