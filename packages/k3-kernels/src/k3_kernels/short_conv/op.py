"""short_conv by Triton: the op of k3_core, its variant with the q/k norm, and the decode update.

No host reads: with `seqlens` left out nothing waits for the device, lengths are not needed.
Legend: T packed tokens, N sequences, C channels, W taps, B rows, L tokens a row, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_kernels.launch import check_floats, last_contiguous
from k3_kernels.short_conv import kernel
from k3_kernels.short_conv.backward import short_conv_backward


class Tile(NamedTuple):
    """Tokens of a run, runs and channels of a program, warps, most registers (None: any)."""

    run: int
    runs: int
    channels: int
    num_warps: int
    num_registers: int | None = None


TILE = Tile(8, 4, 128, 2, 128)


def _backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needs: Needs,
    x_TC: Tensor,
    weight_C1W: Tensor,
    cu_seqlens_N1: Tensor,
    initial_state_NCW: Tensor | None,
) -> Gradients:
    """It makes the sums before the SiLU again."""
    names = "x_TC", "weight_C1W", "initial_state_NCW"
    inputs = x_TC, weight_C1W, initial_state_NCW, cu_seqlens_N1
    d_y_TC, d_final_NCW = (*grads, None)[:2]
    wanted = tuple(needs[name] for name in names)
    found = short_conv_backward(*inputs, d_y_TC, d_final_NCW, wanted)
    return dict(zip(names, found, strict=True))


@custom_op("short_conv.triton", backward=_backward)
def short_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    *,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NCW: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `k3_core.ops.short_conv.ShortConv`.

    Lengths are checked on the host only when `seqlens` is given (their number, their sum).
    """
    y_TC = _convolve(x_TC, weight_C1W, cu_seqlens_N1, seqlens, initial_state_NCW, 0, 0, 0.0)
    if not output_final_state:
        return y_TC, None
    return y_TC, _final_state(x_TC, weight_C1W.shape[2], cu_seqlens_N1, initial_state_NCW)


def short_conv_norm(
    x_TC: Tensor,
    weight_C1W: Tensor,
    *,
    cu_seqlens_N1: Tensor,
    head_dim: int,
    num_norm_channels: int,
    eps: float = 1e-6,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NCW: Tensor | None = None,
) -> Tensor:
    """short_conv whose first channels (q and k) are L2-normalised by heads after the SiLU.

    x * rsqrt(sum x^2 + eps) over each group of `head_dim` channels below `num_norm_channels`
    (a multiple of it); the other channels are as in `short_conv` (architecture 3.2 step 2).
    """
    if num_norm_channels % head_dim or x_TC.shape[1] % head_dim:
        raise ValueError(
            f"short_conv_norm: head_dim {head_dim} must divide the channels {x_TC.shape[1]} and "
            f"the normalised ones {num_norm_channels}"
        )
    return _convolve(
        x_TC,
        weight_C1W,
        cu_seqlens_N1,
        seqlens,
        initial_state_NCW,
        head_dim,
        num_norm_channels,
        eps,
    )


def short_conv_update(
    x_BLC: Tensor,
    weight_C1W: Tensor,
    *,
    state_SCW: Tensor,
    slots_B: Tensor,
    num_commit_B: Tensor | None = None,
) -> Tensor:
    """y [B, L, C] of L new tokens a row, the windows `state[slots]` [S, C, W-1] moved in place.

    The state moves by the first `num_commit` tokens only (None: all L), which is how a verify
    step takes rejected tokens back. A slot outside 0..S-1 (padded rows use -1) gives zeros and
    touches nothing. `slots` may be strided. Slots of live rows must be distinct.
    """
    num_rows, num_new, num_channels = x_BLC.shape
    width = weight_C1W.shape[2]
    check_floats("short_conv", x=x_BLC, weight=weight_C1W, state=state_SCW)
    if state_SCW.shape[1:] != (num_channels, width - 1) or not state_SCW.is_contiguous():
        raise ValueError(
            f"short_conv_update: state must be contiguous [S, {num_channels}, {width - 1}], got "
            f"{list(state_SCW.shape)} with strides {state_SCW.stride()}"
        )
    x_BLC = x_BLC.contiguous()
    y_BLC = torch.empty_like(x_BLC)
    block = min(256, triton.next_power_of_2(num_channels))
    grid = (num_rows * triton.cdiv(num_channels, block),)
    if x_BLC.numel():
        kernel.update_kernel[grid](
            x_BLC,
            weight_C1W.contiguous(),
            state_SCW,
            slots_B,
            num_commit_B.contiguous() if num_commit_B is not None else slots_B,
            y_BLC,
            num_channels,
            slots_B.stride(0),
            state_SCW.shape[0],
            L=num_new,
            W=width,
            HAS_COMMIT=num_commit_B is not None,
            BC=block,
            WPAD=triton.next_power_of_2(width),
            num_warps=4,
        )
    return y_BLC


def _convolve(
    x_TC: Tensor,
    weight_C1W: Tensor,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None,
    initial_state_NCW: Tensor | None,
    head_dim: int,
    num_norm_channels: int,
    eps: float,
) -> Tensor:
    check_floats("short_conv", x=x_TC, weight=weight_C1W)
    num_tokens, num_channels = x_TC.shape
    num_sequences, width = cu_seqlens_N1.numel() - 1, weight_C1W.shape[2]
    _check_shapes(x_TC, weight_C1W, num_sequences, seqlens, initial_state_NCW)
    x_TC = last_contiguous(x_TC)
    y_TC = torch.empty(num_tokens, num_channels, dtype=x_TC.dtype, device=x_TC.device)
    if not x_TC.numel():
        return y_TC
    tile = TILE
    block_c = min(tile.channels, triton.next_power_of_2(num_channels))
    head = head_dim or block_c
    padded = triton.next_power_of_2(head)
    block_c = max(block_c, padded)
    num_tiles = triton.cdiv(num_channels, block_c // padded * head)
    kernel.conv_kernel[(triton.cdiv(num_tokens, tile.run * tile.runs) * num_tiles,)](
        x_TC,
        weight_C1W.contiguous(),
        cu_seqlens_N1,
        # As rows of channels, like x.
        initial_state_NCW.mT.contiguous() if initial_state_NCW is not None else x_TC,
        y_TC,
        num_tokens,
        num_sequences,
        num_channels,
        num_norm_channels,
        x_TC.stride(0),
        eps,
        W=width,
        WPAD=triton.next_power_of_2(width),
        STEPS=(num_sequences - 1).bit_length(),
        HAS_INITIAL=initial_state_NCW is not None,
        NORM=head_dim > 0,
        EVEN_C=head == padded and num_channels % block_c == 0,
        HEAD=head,
        HPAD=padded,
        RUN=tile.run,
        R=tile.runs,
        BC=block_c,
        num_warps=tile.num_warps,
        maxnreg=tile.num_registers,
    )
    return y_TC


def _final_state(x_TC: Tensor, width: int, cu_N1: Tensor, initial_NCW: Tensor | None) -> Tensor:
    num_sequences, num_channels = cu_N1.numel() - 1, x_TC.shape[1]
    dtype = x_TC.dtype if initial_NCW is None else initial_NCW.dtype
    shape = (num_sequences, num_channels, width - 1)
    final_NCW = torch.empty(shape, dtype=dtype, device=x_TC.device)
    if not final_NCW.numel():
        return final_NCW
    x_TC = last_contiguous(x_TC)
    block = min(256, triton.next_power_of_2(num_channels))
    kernel.final_state_kernel[(num_sequences * triton.cdiv(num_channels, block),)](
        x_TC,
        cu_N1,
        initial_NCW.contiguous() if initial_NCW is not None else x_TC,
        final_NCW,
        num_channels,
        x_TC.stride(0),
        W=width,
        HAS_INITIAL=initial_NCW is not None,
        BC=block,
        num_warps=4,
    )
    return final_NCW


def _check_shapes(
    x_TC: Tensor,
    weight_C1W: Tensor,
    num_sequences: int,
    seqlens: tuple[int, ...] | None,
    initial_NCW: Tensor | None,
) -> None:
    num_tokens, num_channels = x_TC.shape
    if weight_C1W.shape[:2] != (num_channels, 1):
        raise ValueError(
            f"short_conv: weight must be [C, 1, W] with C = {num_channels} from x, got "
            f"{list(weight_C1W.shape)}"
        )
    if seqlens is not None and (len(seqlens) != num_sequences or sum(seqlens) != num_tokens):
        raise ValueError(
            f"short_conv: seqlens {tuple(seqlens)} do not fit {num_sequences} sequences of "
            f"{num_tokens} tokens together"
        )
    if num_sequences < 1 and num_tokens:
        raise ValueError("short_conv: cu_seqlens has no sequence; pass N + 1 offsets")
    shape = (num_sequences, num_channels, weight_C1W.shape[2] - 1)
    if initial_NCW is not None and tuple(initial_NCW.shape) != shape:
        raise ValueError(
            f"short_conv: initial_state has shape {list(initial_NCW.shape)}, expected "
            f"{list(shape)}: one state per sequence, the last W - 1 inputs, oldest first"
        )
