"""Results of kda_segment without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.ops.kda_segment import AffineMap
from k3_core.ops.math import math_dtype


def meta(
    k_THK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
) -> AffineMap:
    """M and S in the math dtype."""
    (_, num_heads, num_k), num_v = k_THK.shape, v_THV.shape[2]
    lead, dtype = (cu_seqlens_N1.shape[0] - 1, num_heads), math_dtype(k_THK)
    M_NHKK = k_THK.new_empty(*lead, num_k, num_k, dtype=dtype)
    return M_NHKK, k_THK.new_empty(*lead, num_v, num_k, dtype=dtype)
