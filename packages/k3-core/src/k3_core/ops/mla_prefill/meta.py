"""Results of mla_prefill without values, for graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype

CONSTANT_RESULTS = (1,)


def meta(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    *,
    scale: float,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_q: tuple[int, ...] | None = None,
    seqlens_k: tuple[int, ...] | None = None,
    return_max: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """o in `out_dtype` (None: that of v), and the heads' largest scores where asked for."""
    o_THV = v_SHV.new_empty(*q_THD.shape[:2], v_SHV.shape[2], dtype=out_dtype)
    if not return_max:
        return o_THV
    return o_THV, q_THD.new_empty(q_THD.shape[1], dtype=math_dtype(q_THD))
