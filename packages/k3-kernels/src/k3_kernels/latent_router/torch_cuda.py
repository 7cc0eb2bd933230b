"""latent_router on CUDA by torch: 16-bit products whose float32 sums are kept for the router.

A product of two bfloat16 or float16 values is exact in float32, so that only the order of the sum
tells such logits from those of the reference, which multiplies float32 copies without tensor cores.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.latent_router import reference
from k3_kernels.launch import needs_grad


def latent_router(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """As `latent_router.reference`, which serves calls that are not `is_uniform`."""
    if x_TD.dtype.itemsize != 2 or not is_uniform(x_TD, latent_LD, router_ED):
        return reference.latent_router(x_TD, latent_LD, router_ED)
    return F.linear(x_TD, latent_LD), torch.mm(x_TD, router_ED.mT, out_dtype=torch.float32)


def is_uniform(*tensors: Tensor) -> bool:
    """Whether all dtypes are one, no gradient is wanted, and autocast does not change dtypes.

    A float32 router beside bfloat16 activations cannot share their products: rounding it would
    move logits by 1e-3 of their size and choices with them.
    """
    return (
        len({tensor.dtype for tensor in tensors}) == 1
        and not needs_grad(*tensors)
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )
