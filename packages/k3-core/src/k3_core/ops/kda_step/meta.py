"""Results of kda_step without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op.arguments import Written


def meta(
    q_BWHK: Tensor,
    k_BWHK: Tensor,
    v_BWHV: Tensor,
    gate_BWHK: Tensor,
    beta_BWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Written,
    slots_B: Tensor,
    lower_bound: float | None,
    scale: float | None = None,
    num_commit_B: Tensor | None = None,
    writes_BWHV: Written = None,
) -> Tensor:
    """As v."""
    return v_BWHV.new_empty(v_BWHV.shape)
