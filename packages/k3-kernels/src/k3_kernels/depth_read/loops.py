"""depth_read as compiled loops, for a few tokens on a CPU. T tokens, D model width, S sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.attn_res.loops import addresses, fits, mix_row, query
from k3_kernels.depth_read import cpu
from k3_kernels.loops import DTYPES, compiled, takes, vector
from k3_kernels.rms_norm.loops import norm_row


def depth_read(
    sources: Sequence[Tensor],
    prefix_TD: Tensor,
    added_TD: Tensor | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    *,
    eps: float,
    out_eps: float,
) -> tuple[Tensor, Tensor]:
    """(x, sum), both [T, D]; as `k3_core.ops.depth_read.DepthRead`."""
    is_taken = (
        takes(prefix_TD, added_TD, norm_D, proj_1D, out_norm_D, *sources)
        and fits((prefix_TD, *sources), norm_D, proj_1D)
        and (added_TD is None or (added_TD.shape == prefix_TD.shape and added_TD.is_contiguous()))
        and out_norm_D.shape == norm_D.shape
        and out_norm_D.is_contiguous()
    )
    if not is_taken:
        return cpu.depth_read(
            sources, prefix_TD, added_TD, norm_D, proj_1D, out_norm_D, eps=eps, out_eps=out_eps
        )
    num_rows, width = prefix_TD.shape
    x_TD = torch.empty_like(prefix_TD)
    sum_TD = prefix_TD if added_TD is None else torch.empty_like(prefix_TD)
    launch(
        _read_rows,
        addresses((*sources, sum_TD)),
        len(sources) + 1,
        prefix_TD.data_ptr(),
        0 if added_TD is None else added_TD.data_ptr(),
        sum_TD.data_ptr(),
        norm_D.data_ptr(),
        proj_1D.data_ptr(),
        out_norm_D.data_ptr(),
        x_TD.data_ptr(),
        num_rows,
        width,
        eps,
        out_eps,
        DTYPES[x_TD.dtype],
    )
    return x_TD, sum_TD


@compiled
def _read_rows(
    sources: tuple[int, ...],
    num_sources: int,
    prefix: int,
    added: int,
    total: int,
    norm: int,
    proj: int,
    out_norm: int,
    x: int,
    num_rows: int,
    width: int,
    eps: float,
    out_eps: float,
    dtype: Any,
) -> None:
    if added:
        length = num_rows * width
        prefix_N, added_N = vector(prefix, length, dtype), vector(added, length, dtype)
        total_N = vector(total, length, dtype)
        for n in range(length):
            total_N[n] = prefix_N[n] + added_N[n]
    query_D, weights_S = query(norm, proj, width, dtype), np.empty(num_sources, dtype)
    mix_D, out_norm_D = np.empty(width, dtype), vector(out_norm, width, dtype)
    for t in range(num_rows):
        mix_row(sources, t, query_D, eps, weights_S, mix_D)
        x_D = vector(x + t * width * mix_D.itemsize, width, dtype)
        norm_row(mix_D, out_norm_D, out_eps, x_D)
