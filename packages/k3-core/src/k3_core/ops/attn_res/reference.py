"""Reference of attn_res. T tokens, D model width; the sources are a Python list."""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype, rms_scale


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the un-normalised v_i.

    `values` are [T, D] tensors in order of depth. Scores and softmax are float32 without a
    scale. Returns [T, D] in the dtype of the last source (the running block sum).
    """
    if not values:
        raise ValueError("attn_res needs at least one source")
    dtype = math_dtype(values[0])
    query_D = norm_D.to(dtype) * proj_1D.to(dtype).reshape(-1)
    sources = [value.to(dtype) for value in values]
    scores = [(x * query_D).sum(-1, keepdim=True) * rms_scale(x, eps) for x in sources]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    mixed = sum(x * weights[:, i : i + 1] for i, x in enumerate(sources))
    return mixed.to(values[-1].dtype)  # type: ignore[union-attr]
