"""latent_router as a compiled loop, for a few tokens on a CPU.

T tokens, D model width, L latent width, E experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3_core.ops.latent_router import reference
from k3_core.replay import launch
from k3_kernels.loops import DTYPES, compiled, takes, vector
from k3_kernels.loops.math import products_of_rows

MAX_PRODUCTS = 2**19
"""Multiplications of a call. With more, torch's products pay for their calls."""


def latent_router(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Latent [T, L] and router logits [T, E]; as the reference."""
    (num_tokens, width), num_latent, num_experts = x_TD.shape, len(latent_LD), len(router_ED)
    is_taken = (
        num_tokens * width * (num_latent + num_experts) <= MAX_PRODUCTS
        and latent_LD.shape == (num_latent, width)
        and router_ED.shape == (num_experts, width)
        and latent_LD.is_contiguous()
        and router_ED.is_contiguous()
        and takes(x_TD, latent_LD, router_ED)
    )
    if not is_taken:
        return reference.latent_router(x_TD, latent_LD, router_ED)
    x_TD = x_TD.contiguous()
    latent_TL = x_TD.new_empty(num_tokens, num_latent)
    logits_TE = x_TD.new_empty(num_tokens, num_experts)
    launch(
        _project,
        x_TD.data_ptr(),
        latent_LD.data_ptr(),
        router_ED.data_ptr(),
        latent_TL.data_ptr(),
        logits_TE.data_ptr(),
        num_tokens,
        width,
        num_latent,
        num_experts,
        DTYPES[x_TD.dtype],
    )
    return latent_TL, logits_TE


@compiled
def _project(
    x: int,
    latent: int,
    router: int,
    latent_out: int,
    logits_out: int,
    num_tokens: int,
    width: int,
    num_latent: int,
    num_experts: int,
    dtype: Any,
) -> None:
    latent_LD = vector(latent, num_latent * width, dtype).reshape(num_latent, width)
    router_ED = vector(router, num_experts * width, dtype).reshape(num_experts, width)
    x_TD = vector(x, num_tokens * width, dtype).reshape(num_tokens, width)
    latent_TL = vector(latent_out, num_tokens * num_latent, dtype).reshape(num_tokens, num_latent)
    logits_TE = vector(logits_out, num_tokens * num_experts, dtype)
    products_of_rows(latent_LD, x_TD, num_tokens, latent_TL)
    products_of_rows(router_ED, x_TD, num_tokens, logits_TE.reshape(num_tokens, num_experts))
