"""MXFP4 weights kept packed: two E2M1 codes a byte, one E8M0 scale for 32 columns.

Source: architecture 2.2 and the OCP Microscaling format. Byte j of a row holds column 2j in its
low nibble and column 2j + 1 in its high nibble; a scale byte s multiplies its block by
2**(s - 127), so byte 0 is 2**-127 and not zero; byte 255 is NaN and refused.

Legend: ... leading sizes, N columns, P = N / 2 packed bytes, G = N / 32 scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-one for one in _MAGNITUDES))
_SCALES = (*(2.0 ** (byte - 127) for byte in range(255)), float("nan"))
# Above this scale a code of 4 or 6 leaves the range of float32 and bfloat16.
_MAX_SCALE = 252
_TWICE_AS_WIDE = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A weight in MXFP4.

    packed: uint8 [..., P]. scale: uint8 [..., G]. Shapes and dtypes are checked here, the values
    of the scales by `bad_scale` where they enter (reading them here would be a sync on CUDA).
    """

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        for name in ("packed", "scale"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.uint8:
                raise ValueError(f"MXTensor {name} is {tensor.dtype}; it must be torch.uint8")
        wanted = (*self.packed.shape[:-1], self.packed.shape[-1] * 2 // BLOCK)
        if self.packed.shape[-1] * 2 % BLOCK or tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"MXTensor packed {tuple(self.packed.shape)} and scale {tuple(self.scale.shape)} "
                f"do not match: a row of N columns has N/2 bytes and N/{BLOCK} scales, with N a "
                f"multiple of {BLOCK}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight [..., N]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together: 0.53125 a weight."""
        return self.packed.numel() + self.scale.numel()

    def __getitem__(self, index: int | slice | Tensor) -> MXTensor:
        """A view along the first dimension, which must not be the column dimension.

        A tensor of indices gives a copy.
        """
        return MXTensor(self.packed[index], self.scale[index])

    def to(self, device: torch.device | str) -> MXTensor:
        """The same weight on another device."""
        return MXTensor(self.packed.to(device), self.scale.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [..., N]; exact in float32, float64 and bfloat16, rounded in float16."""
        exact = torch.float32 if dtype == torch.float16 else dtype
        pairs = _byte_table(self.device, exact).index_select(0, self.packed.reshape(-1).int())
        factors = _scale_table(self.device, exact).index_select(0, self.scale.reshape(-1).int())
        blocks = pairs.view(exact).view(*self.scale.shape, BLOCK)
        return blocks.mul_(factors.view(*self.scale.shape, 1)).view(self.shape).to(dtype)


def bad_scale(scale: Tensor) -> str | None:
    """Why a scale tensor (uint8) cannot be used, or None: 255 is NaN, 253 and 254 overflow."""
    worst = int(scale.max()) if scale.numel() else 0
    if worst <= _MAX_SCALE:
        return None
    kind = "NaN" if worst == 255 else "a factor that leaves the range of float32"
    return f"the E8M0 scale byte {worst} is {kind}, allowed: 0 to {_MAX_SCALE}"


@functools.cache
def _byte_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256]: the two values of a byte, even column first, as one element twice as wide as `dtype`.

    A gather of one element is many times as fast as one of two.
    """
    pairs = [(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)]
    table = torch.tensor(pairs, dtype=torch.float64).to(device=device, dtype=dtype)
    return table.view(_TWICE_AS_WIDE[dtype]).flatten()


@functools.cache
def _scale_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256]: the factor of a scale byte; powers of two down to 2**-127, also as subnormals."""
    return torch.tensor(_SCALES, dtype=torch.float64).to(device=device, dtype=dtype)
