"""Results of kda_replay without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op.arguments import Written


def meta(
    k_BWHK: Tensor,
    gate_BWHK: Tensor,
    writes_BWHV: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Written,
    slots_B: Tensor,
    num_accepted_B: Tensor,
    lower_bound: float | None,
    x_BWC: Tensor | None = None,
    window_SCR: Written = None,
) -> None:
    """Nothing is returned."""
