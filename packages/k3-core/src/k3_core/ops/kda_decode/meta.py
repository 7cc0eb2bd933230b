"""Results of kda_decode without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op.arguments import Written


def meta(
    x_BWC: Tensor,
    conv_weight_C1R: Tensor,
    gate_BWHK: Tensor,
    beta_BWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    out_gate_BWHV: Tensor,
    norm_weight_V: Tensor,
    *,
    state_SHVK: Written,
    window_SCR: Written,
    slots_B: Tensor,
    lower_bound: float | None,
    eps: float,
    scale: float | None = None,
    keys_BWHK: Written = None,
    writes_BWHV: Written = None,
) -> Tensor:
    """As the output gate."""
    return out_gate_BWHV.new_empty(out_gate_BWHV.shape)
