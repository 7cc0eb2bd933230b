"""Results of kda_chunk without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op.arguments import Written
from k3_core.ops.math import math_dtype


def meta(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    scale: float | None = None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NHVK: Tensor | None = None,
    output_final_state: bool = False,
    checkpoint_offsets: tuple[tuple[int, ...], ...] | None = None,
    checkpoints_EHVK: Written = None,
) -> tuple[Tensor, Tensor | None]:
    """o as v, and the final state in the math dtype where it is asked for."""
    o_THV = v_THV.new_empty(v_THV.shape)
    if not output_final_state:
        return o_THV, None
    shape = (cu_seqlens_N1.shape[0] - 1, *v_THV.shape[1:], q_TGK.shape[2])
    return o_THV, v_THV.new_empty(shape, dtype=math_dtype(v_THV))
