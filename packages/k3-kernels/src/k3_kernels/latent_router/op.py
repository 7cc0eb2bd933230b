"""latent_router by Triton. T tokens, D model width, L latent width, E experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.latent_router import reference
from k3_core.ops.math import without_autocast
from k3_kernels.early import early_launch
from k3_kernels.hopper import fits_descriptors
from k3_kernels.latent_router.kernel import add_splits_kernel, few_rows_kernel, latent_router_kernel
from k3_kernels.launch import (
    check_floats,
    dot_precision,
    last_contiguous,
    needs_grad,
    product_float32,
)
from k3_kernels.linear.op import MAX_INPUTS, MAX_ROWS, choose_wide_tile, describe_rows

GROUP = 8
"""Most tiles of tokens that are neighbours in time."""
BLOCK = 1024
"""Outputs of a program that adds up splits."""


class Tile(NamedTuple):
    """Tokens x outputs of a program, inputs a step, parts of the inputs, warps, stages."""

    tokens: int
    outputs: int
    step: int
    splits: int
    num_warps: int
    num_stages: int


# (most tokens, tile); the splits let 35 blocks of 128 outputs reach 132 multiprocessors.
TILES = (
    (16, Tile(16, 128, 128, 4, 4, 3)),
    (32, Tile(32, 128, 64, 4, 4, 4)),
    (64, Tile(64, 128, 64, 4, 4, 4)),
    (128, Tile(128, 128, 64, 4, 8, 4)),
    (256, Tile(128, 128, 64, 2, 8, 4)),
    (1024, Tile(128, 128, 64, 1, 8, 4)),
    (float("inf"), Tile(256, 128, 64, 1, 8, 4)),
)
TILE_FLOAT32 = Tile(64, 64, 32, 1, 8, 2)


def latent_router(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """As `latent_router.reference`: latent in the dtype of x, logits in float32, of one product.

    Weights may be float32 beside a 16-bit x, as under autocast: the latent's are rounded, the
    router's are not. The reference runs other mixtures of dtypes, calls in float32 that need
    gradients, and rows that do not start on 16-byte boundaries.
    """
    if not _takes(x_TD, latent_LD, router_ED):
        return reference.latent_router(x_TD, latent_LD, router_ED)
    return _latent_router(x_TD, latent_LD, router_ED)


def _takes(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> bool:
    """Whether the kernel computes this call."""
    weights, device = (latent_LD, router_ED), x_TD.device.type
    is_autocast = torch.is_autocast_enabled(device)
    if x_TD.dtype != (torch.get_autocast_dtype(device) if is_autocast else latent_LD.dtype):
        return False
    if x_TD.element_size() == 2:
        return x_TD.dim() == 2 and all(w.dtype in (x_TD.dtype, torch.float32) for w in weights)
    return router_ED.dtype == x_TD.dtype and not needs_grad(x_TD, *weights)


def _backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needs: Needs,
    x_TD: Tensor,
    latent_LD: Tensor,
    router_ED: Tensor,
) -> Gradients:
    """Both weights as one, N = L + E outputs: a product for x and one for the weights."""
    num_latent = len(latent_LD)
    d_out_TN = torch.cat(
        [
            x_TD.new_zeros(len(x_TD), len(weight)) if grad is None else grad.to(x_TD.dtype)
            for grad, weight in zip(grads, (latent_LD, router_ED), strict=True)
        ],
        dim=1,
    )
    with without_autocast(x_TD):
        d_x_TD = d_weight_ND = None
        if needs["x_TD"]:
            d_x_TD = d_out_TN @ torch.cat([latent_LD.to(x_TD.dtype), router_ED.to(x_TD.dtype)])
        if needs["latent_LD"] or needs["router_ED"]:
            d_weight_ND = product_float32(d_out_TN.mT, x_TD)
    return {
        "x_TD": d_x_TD,
        "latent_LD": None if d_weight_ND is None else d_weight_ND[:num_latent].to(latent_LD.dtype),
        "router_ED": None if d_weight_ND is None else d_weight_ND[num_latent:].to(router_ED.dtype),
    }


@custom_op("latent_router.triton", backward=_backward)
def _latent_router(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    dtype = x_TD.dtype
    tensors = last_contiguous(x_TD), latent_LD.to(dtype), router_ED.to(dtype)
    if not fits_descriptors(*tensors):
        return reference.latent_router(x_TD, latent_LD, router_ED)
    rest_ED = None if router_ED.dtype == dtype else (router_ED - tensors[2]).to(dtype)
    x_TD, latent_LD, router_ED = tensors
    check_floats("latent_router", x=x_TD)
    if len({tensor.shape[1] for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"latent_router: x, latent and router {shapes} are not [T, D], [L, D], [E, D]"
        )
    num_tokens, num_latent, num_experts = (len(tensor) for tensor in tensors)
    z_TL = x_TD.new_empty(num_tokens, num_latent)
    logits_TE = x_TD.new_empty(num_tokens, num_experts, dtype=torch.float32)
    if not num_tokens:
        return z_TL, logits_TE
    is_few = num_tokens <= MAX_ROWS and x_TD.shape[1] <= MAX_INPUTS
    if is_few and x_TD.element_size() == 2 and rest_ED is None:
        _multiply_few(*tensors, z_TL, logits_TE)
        return z_TL, logits_TE
    tile = choose_tile(x_TD)
    if tile.splits == 1:
        _multiply(*tensors, rest_ED, z_TL, logits_TE, tile)
        return z_TL, logits_TE
    parts_shape = tile.splits, num_tokens, num_latent + num_experts
    parts_STN = x_TD.new_empty(parts_shape, dtype=torch.float32)
    part_TL, part_TE = parts_STN[0].split((num_latent, num_experts), dim=1)
    _multiply(*tensors, rest_ED, part_TL, part_TE, tile)
    add_splits_kernel[(num_tokens * triton.cdiv(parts_shape[2], BLOCK),)](
        parts_STN,
        z_TL,
        logits_TE,
        num_tokens,
        L=num_latent,
        E=num_experts,
        SPLITS=tile.splits,
        BLOCK=BLOCK,
        **early_launch(num_tokens, x_TD.device),
        num_warps=4,
    )
    return z_TL, logits_TE


def _multiply_few(
    x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor, z_TL: Tensor, logits_TE: Tensor
) -> None:
    """Fill both outputs."""
    (num_tokens, width), num_latent, num_experts = x_TD.shape, len(latent_LD), len(router_ED)
    tile = choose_wide_tile(num_tokens, width, num_latent + num_experts)
    num_blocks = triton.cdiv(num_latent, tile.outputs) + triton.cdiv(num_experts, tile.outputs)
    few_rows_kernel[(triton.cdiv(num_tokens, tile.rows) * num_blocks,)](
        describe_rows(x_TD, tile.rows),
        describe_rows(latent_LD, tile.outputs),
        describe_rows(router_ED, tile.outputs),
        z_TL,
        logits_TE,
        num_tokens,
        L=num_latent,
        E=num_experts,
        BM=tile.rows,
        BN=tile.outputs,
        PRECISION=dot_precision(x_TD.dtype),
        **early_launch(num_tokens, x_TD.device),
    )


def choose_tile(x_TD: Tensor) -> Tile:
    """The tile for these tokens, from `TILES`."""
    if x_TD.dtype == torch.float32:
        return TILE_FLOAT32
    return next(tile for most, tile in TILES if len(x_TD) <= most)


def _multiply(
    x_TD: Tensor,
    latent_LD: Tensor,
    router_ED: Tensor,
    rest_ED: Tensor | None,
    z_TL: Tensor,
    logits_TE: Tensor,
    tile: Tile,
) -> None:
    """Fill both outputs; with splits they are views of the first, the others follow T rows on."""
    (num_tokens, width), num_latent, num_experts = x_TD.shape, len(latent_LD), len(router_ED)
    row_tiles = triton.cdiv(num_tokens, tile.tokens)
    group = min(GROUP, triton.next_power_of_2(row_tiles))
    num_blocks = triton.cdiv(num_latent, tile.outputs) + triton.cdiv(num_experts, tile.outputs)
    latent_router_kernel[(triton.cdiv(row_tiles, group) * group * num_blocks * tile.splits,)](
        _describe(x_TD, tile.tokens, tile.step),
        _describe(latent_LD, tile.outputs, tile.step),
        _describe(router_ED, tile.outputs, tile.step),
        _describe(router_ED if rest_ED is None else rest_ED, tile.outputs, tile.step),
        z_TL,
        logits_TE,
        num_tokens,
        z_TL.stride(0),
        logits_TE.stride(0),
        D=width,
        L=num_latent,
        E=num_experts,
        HAS_REST=rest_ED is not None,
        SPLITS=tile.splits,
        BM=tile.tokens,
        BN=tile.outputs,
        BK=tile.step,
        GROUP=group,
        **early_launch(num_tokens, x_TD.device),
        PRECISION=dot_precision(x_TD.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
