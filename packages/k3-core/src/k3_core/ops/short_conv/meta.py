"""Results of short_conv without values, for graphs."""

from __future__ import annotations

from torch import Tensor


def meta(
    x_TC: Tensor,
    weight_C1W: Tensor,
    *,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NCW: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As x, and the final state where it is asked for."""
    y_TC = x_TC.new_empty(x_TC.shape)
    if not output_final_state:
        return y_TC, None
    like = x_TC if initial_state_NCW is None else initial_state_NCW
    shape = (cu_seqlens_N1.shape[0] - 1, x_TC.shape[1], weight_C1W.shape[2] - 1)
    return y_TC, like.new_empty(shape)
