"""short_conv, one sequence at a time: its history in front, then W shifted products.

Out of place, so autograd differentiates it; float64-capable (architecture 3.2 step 1).
Legend: T packed tokens, N sequences, C channels, W taps, L tokens of one sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.short_conv.inputs import check_inputs


@custom_op("short_conv.reference")
def short_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    *,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NCW: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU; as `k3_core.ops.short_conv.ShortConv`."""
    lengths = check_inputs(x_TC, weight_C1W, cu_seqlens_N1, seqlens, initial_state_NCW)
    width, dtype = weight_C1W.shape[2], math_dtype(x_TC)
    if initial_state_NCW is None:
        initial_state_NCW = x_TC.new_zeros(len(lengths), x_TC.shape[1], width - 1)
    weight_WC = weight_C1W[:, 0].t().to(dtype)
    outputs, final_states = [], []
    for n, x_LC in enumerate(x_TC.split(lengths)):
        history_LC = torch.cat([initial_state_NCW[n].t().to(dtype), x_LC.to(dtype)])
        num_tokens = x_LC.shape[0]
        taps = [history_LC[j : j + num_tokens] * weight_WC[j] for j in range(width)]
        outputs.append(F.silu(torch.stack(taps).sum(0)))
        final_states.append(history_LC[num_tokens:].t())
    y_TC = torch.cat(outputs).to(x_TC.dtype) if outputs else torch.zeros_like(x_TC)
    if not output_final_state:
        return y_TC, None
    if not final_states:
        return y_TC, initial_state_NCW.clone()
    return y_TC, torch.stack(final_states).to(initial_state_NCW.dtype)
