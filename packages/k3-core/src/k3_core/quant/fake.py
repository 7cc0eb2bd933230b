"""Values as MXFP4 and MXFP8 would hold them, for training with quantised experts (report 8.7).

Blocks of 32 along the last dimension share the scale 2^(floor(log2(max |x|)) - e), e being 2 for
E2M1 and 8 for E4M3: the floor rule of `mx_quantize`. Values are rounded to the nearest, ties to
even; magnitudes above 6 or 448 units saturate. Gradients pass unchanged (straight through).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3_core.quant.mx import BLOCK


class _Format(NamedTuple):
    """Stored mantissa bits, exponents of the smallest normal and of the largest value."""

    mantissa: int
    smallest: int
    largest: int
    limit: float


_E2M1 = _Format(1, 0, 2, 6.0)
_E4M3 = _Format(3, -6, 8, 448.0)


def fake_mxfp4(w: Tensor) -> Tensor:
    """w [..., N] rounded to MXFP4, in its dtype: what `mx_quantize` keeps of it."""
    result: Tensor = _StraightThrough.apply(w, _E2M1)
    return result


def fake_mxfp8(x: Tensor) -> Tensor:
    """x [..., N] rounded to MXFP8 (E4M3), in its dtype."""
    result: Tensor = _StraightThrough.apply(x, _E4M3)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: _Format) -> Tensor:
        return _rounded(x, kind)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return d_out, None


def _rounded(x: Tensor, kind: _Format) -> Tensor:
    """In float32, or float64 for float64; a block with NaN or infinity becomes NaN."""
    check_width(x)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    blocks = wide.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = (_exponent(largest) - kind.largest).clamp(min=-127)
    units = torch.ldexp(blocks, -scale)
    step = _exponent(units.abs()).clamp(min=kind.smallest) - kind.mantissa
    codes = torch.ldexp(torch.ldexp(units, -step).round(), step).clamp(-kind.limit, kind.limit)
    is_good = largest < float("inf")
    return torch.ldexp(codes, scale).where(is_good, float("nan")).flatten(-2).to(x.dtype)


def _exponent(magnitude: Tensor) -> Tensor:
    """floor(log2(magnitude)), -127 for zero."""
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent with m in [0.5, 1)
    return torch.where(magnitude > 0, exponent - 1, -127)


def check_width(x: Tensor) -> None:
    """Raise ValueError where blocks would straddle rows."""
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"MX blocks need a last dimension that is a multiple of {BLOCK}, got the shape "
            f"{tuple(x.shape)}; choose such a width or keep the experts unquantised"
        )
