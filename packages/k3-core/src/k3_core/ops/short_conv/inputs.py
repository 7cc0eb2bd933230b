"""Checks of short_conv's arguments (architecture 3.2 step 1).

Legend: T packed tokens, N sequences, C channels, W taps.
"""

from __future__ import annotations

from torch import Tensor

from k3_core.ops.varlen import host_lengths


def check_inputs(
    x_TC: Tensor,
    weight_C1W: Tensor,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None,
    initial_state_NCW: Tensor | None,
) -> tuple[int, ...]:
    """The lengths of the sequences; raises ValueError or TypeError for what does not fit."""
    if x_TC.dim() != 2:
        raise ValueError(f"short_conv: x must be [T, C], got {list(x_TC.shape)}")
    num_channels = x_TC.shape[1]
    if weight_C1W.dim() != 3 or weight_C1W.shape[:2] != (num_channels, 1):
        raise ValueError(
            f"short_conv: weight must be [C, 1, W] with C = {num_channels} from x, got "
            f"{list(weight_C1W.shape)}"
        )
    for name, x in {"x": x_TC, "weight": weight_C1W}.items():
        if not x.is_floating_point():
            raise TypeError(f"short_conv: {name} is {x.dtype}, use a floating-point dtype")
    lengths = host_lengths(cu_seqlens_N1, seqlens, x_TC.shape[0], "short_conv")
    shape = (len(lengths), num_channels, weight_C1W.shape[2] - 1)
    if initial_state_NCW is not None and tuple(initial_state_NCW.shape) != shape:
        raise ValueError(
            f"short_conv: initial_state has shape {list(initial_state_NCW.shape)}, expected "
            f"{list(shape)}: one state per sequence, the last W - 1 inputs, oldest first"
        )
    return lengths
