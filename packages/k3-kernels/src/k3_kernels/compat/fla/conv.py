"""fla.modules.convolution: causal depthwise convolution over a batch or packed sequences.

fla keeps W inputs in a state, K3's op the W - 1 that a convolution of width W reads. Where states
go in or out, the width is therefore W + 1 here with a first tap of zero.
Legend: B rows, T tokens, D channels, W taps, N sequences, L packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_core.ops.math import math_dtype
from k3_kernels.compat.fla.choose import op_for
from k3_kernels.short_conv.cpu import causal_conv

_ACTIVATIONS = (None, "silu", "swish")
_BACKENDS = ("triton", "cuda", "mix")


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y `[B, T, D]` of x with weight `[D, W]`, and the final states `[N, D, W]` or None.

    bias and activation follow the convolution, then the residual is added. K3's op where there is
    a SiLU and no bias, plain torch otherwise; `backend` and the chunk indices choose nothing here.
    Raises ValueError for shapes and names that do not fit, NotImplementedError for `cp_context`.
    """
    if weight is None:
        raise ValueError("weight is None; pass [D, W]")
    _check_name("activation", activation, _ACTIVATIONS)
    _check_name("backend", backend, _BACKENDS)
    if cp_context is not None:
        raise NotImplementedError("cp_context is not served; K3 shards sequences in its trainer")
    num_rows, num_tokens, *channels = x.shape
    x_LD = x.reshape(num_rows * num_tokens, -1)
    if cu_seqlens is None:
        seqlens: tuple[int, ...] | None = (num_tokens,) * num_rows
        cu_seqlens = torch.arange(num_rows + 1, device=x.device) * num_tokens
    elif num_rows != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, x has {num_rows}; flatten it")
    else:
        seqlens = None
        if cu_seqlens_cpu is not None:
            seqlens = tuple(cu_seqlens_cpu.diff().tolist())

    has_states = initial_state is not None or bool(output_final_state)
    weight_D1W = F.pad(weight, (1, 0)) if has_states else weight
    args = x_LD, weight_D1W.unsqueeze(1)
    if bias is None and activation is not None:
        y_LD, final_NDW = op_for("short_conv", x)(
            *args,
            cu_seqlens_N1=cu_seqlens,
            seqlens=seqlens,
            initial_state_NCW=initial_state,
            output_final_state=has_states,
        )
    else:
        y_LD, final_NDW = causal_conv(*args, cu_seqlens, seqlens, initial_state, has_silu=False)
        y_LD = _finish(y_LD, bias, activation, x.dtype)
    y = y_LD.view(num_rows, num_tokens, *channels)
    if residual is not None:
        y = y + residual
    return y, final_NDW if output_final_state else None


def _check_name(what: str, name: str | None, allowed: tuple[str | None, ...]) -> None:
    if name not in allowed:
        raise ValueError(f"{what} is {name!r}; use one of {', '.join(map(repr, allowed))}")


def _finish(
    sums: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """Bias and activation in the math dtype, then `dtype`."""
    if bias is not None:
        sums = sums + bias.to(sums.dtype)
    return (sums if activation is None else F.silu(sums)).to(dtype)


def fast_causal_conv1d_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`causal_conv1d` by fla's name for its mixed backend."""
    return causal_conv1d(
        x,
        weight,
        bias,
        residual,
        initial_state,
        output_final_state,
        activation,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One new token for each of N sequences: x `[N, D]`, `[N, 1, D]` or `[1, N, D]`.

    `cache` `[N, D, W]`, the last W inputs, moves on in place and is returned with y.
    """
    if weight is None:
        raise ValueError("weight is None; pass [D, W]")
    _check_name("activation", activation, _ACTIVATIONS)
    x_ND = x.reshape(-1, weight.shape[0])
    if cache.shape != (*x_ND.shape, weight.shape[1]):
        raise ValueError(
            f"cache has shape {list(cache.shape)}, expected {[*x_ND.shape, weight.shape[1]]} from "
            f"x {list(x.shape)} and weight {list(weight.shape)}"
        )
    cache.copy_(torch.cat([cache[..., 1:], x_ND.unsqueeze(-1).to(cache.dtype)], dim=-1))
    dtype = math_dtype(x)
    sums_ND = (cache.to(dtype) * weight.to(dtype)).sum(-1)
    y = _finish(sums_ND, bias, activation, x.dtype).view(x.shape)
    return y if residual is None else y + residual, cache


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution with a weight `[D, 1, W]`, as `causal_conv1d`."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        _check_name("activation", activation, _ACTIVATIONS)
        _check_name("backend", backend, _BACKENDS)
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """y `[B, T, D]` and the final states; one token a sequence is a `step`, without gradients.

        `mask` `[B, T]` zeroes padded positions of x first and excludes `cu_seqlens`.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask and cu_seqlens both say where sequences end; give one")
            x = x * mask.unsqueeze(-1)
        num_sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if x.shape[0] * x.shape[1] == num_sequences:
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
            **rest,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token a sequence; a given cache `[N, D, W]` moves on in place."""
        if cache is None:
            num_tokens = x.shape[0] * x.shape[1]
            cache = x.new_zeros(num_tokens, self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(
            x, cache, residual, self.weight.squeeze(1), self.bias, self.activation
        )
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        """Values that a sequence keeps."""
        return self.hidden_size * self.kernel_size[0]
