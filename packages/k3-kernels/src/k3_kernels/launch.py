"""What the wrappers of all kernels share: gradient calls, dtypes, dot precision, layouts."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient would have to flow through a call with these arguments.

    Kernels without a backward leave such calls to the differentiable implementation that the op's
    docstring names.
    """
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_floats(op: str, **tensors: Tensor) -> None:
    """Raise TypeError for a dtype that the kernels do not compute in."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; the Triton kernels take float32, bfloat16 and "
                f"float16, for others choose {op}.reference"
            )


def dot_precision(dtype: torch.dtype) -> str:
    """input_precision of tl.dot: exact products for float32; 16-bit operands ignore it."""
    return "ieee" if dtype == torch.float32 else "tf32"


def product_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices, in float32; on a GPU the sums of 16-bit products are kept."""
    if a.is_cuda and a.element_size() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def last_contiguous(x: Tensor) -> Tensor:
    """`x` itself when its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """`x` contiguous and on a 16-byte boundary, which wide loads rely on; a copy if need be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def fitting_stages(stages: int, num_bytes: int) -> int:
    """At most `stages` of a loop that loads `num_bytes` a step ahead, so many as fit Hopper's
    shared memory."""
    return max(1, min(stages, 192 * 1024 // num_bytes))
