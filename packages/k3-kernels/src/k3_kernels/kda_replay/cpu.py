"""kda_replay in plain torch: the accepted tokens of all rows in one product (report 1.8).

Tokens behind the accepted ones decay by 1 and write 0; each key takes the decay of the tokens
behind its own, so that S' = S D_1 ... D_W + sum_i u_i (k_i D_(i+1) ... D_W)^T.
Legend: R rows with accepted tokens, W tokens a row, S slots, H heads, X = R H, K key, V value
channels, C channels of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import l2_normalize, log_decay
from k3_core.ops.kda_replay.inputs import check_replay
from k3_core.ops.math import math_dtype


@custom_op("kda_replay.cpu", is_differentiable=False)
@torch.no_grad()
def kda_replay(
    k_BWHK: Tensor,
    gate_BWHK: Tensor,
    writes_BWHV: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Tensor,
    slots_B: Tensor,
    num_accepted_B: Tensor,
    lower_bound: float | None,
    x_BWC: Tensor | None = None,
    window_SCR: Tensor | None = None,
) -> None:
    """Apply accepted tokens to pooled states; as `k3_core.ops.kda_replay.KdaReplay`."""
    args = (k_BWHK, gate_BWHK, writes_BWHV, A_log_H, dt_bias_HK)
    rows, counts = check_replay(
        args, state_SHVK, slots_B, num_accepted_B, lower_bound, x_BWC, window_SCR
    )
    rows_R = torch.tensor([row for row in rows if counts[row]], device=k_BWHK.device).long()
    if not len(rows_R):
        return
    slots_R, count_R = slots_B[rows_R].long(), num_accepted_B[rows_R]
    dtype = math_dtype(k_BWHK)
    k, gate, writes = (x[rows_R].to(dtype) for x in args[:3])
    is_left = torch.arange(k.shape[1], device=k.device) >= count_R[:, None]
    is_left_RW11 = is_left[..., None, None]
    log = log_decay(gate, A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound)
    log.masked_fill_(is_left_RW11, 0.0)
    from_here = log.flip(1).cumsum(1).flip(1)
    keys_RWHK = l2_normalize(k).mul_((from_here - log).exp_()).masked_fill_(is_left_RW11, 0.0)
    writes_RWHV = writes.masked_fill(is_left_RW11, 0.0)
    state_RHVK = state_SHVK[slots_R].mul_(from_here[:, 0].exp_().unsqueeze(-2))
    writes_XVW = writes_RWHV.permute(0, 2, 3, 1).flatten(0, 1)
    state_RHVK.flatten(0, 1).baddbmm_(writes_XVW, keys_RWHK.transpose(1, 2).flatten(0, 1))
    state_SHVK.index_copy_(0, slots_R, state_RHVK)
    if x_BWC is not None and window_SCR is not None:
        inputs_RCL = torch.cat((window_SCR[slots_R], x_BWC[rows_R].mT.to(window_SCR.dtype)), dim=2)
        kept = count_R[:, None] + torch.arange(window_SCR.shape[2], device=k.device)
        windows = inputs_RCL.gather(2, kept[:, None].expand(-1, inputs_RCL.shape[1], -1))
        window_SCR.index_copy_(0, slots_R, windows)
