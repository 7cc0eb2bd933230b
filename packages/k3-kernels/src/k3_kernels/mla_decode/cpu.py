"""mla_decode in plain torch, one sequence at a time: exactly its tokens are read, and no masks.

A sequence in one page, as in the contiguous cache, is not copied either.
B sequences, H heads, C latent, R shared key, X = C + R cached values a token, P pages, L tokens a
page, M pages a sequence, S tokens of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.mla_decode.reference import check_widths


@custom_op("mla_decode.cpu", is_differentiable=False)
def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention of one query a sequence over its cached latents; as the reference."""
    check_widths(q_latent_BHC, q_rope_BHR, pages_PLX)
    num_latent, page, dtype = q_latent_BHC.shape[-1], pages_PLX.shape[1], math_dtype(q_latent_BHC)
    q_BHX = torch.cat((q_latent_BHC, q_rope_BHR), dim=-1).to(dtype).mul_(scale)
    rows = []
    for q_HX, table_M, length in zip(q_BHX, page_table_BM, lengths_B.tolist(), strict=True):
        if length <= page:
            cached_SX = pages_PLX[table_M[0], :length].to(dtype)
        else:
            pages = pages_PLX[table_M[: -(-length // page)]]
            cached_SX = pages.flatten(0, 1)[:length].to(dtype)
        weights_HS = (q_HX @ cached_SX.mT).softmax(-1).nan_to_num_(0.0)
        rows.append(weights_HS @ cached_SX[:, :num_latent])
    return torch.stack(rows).to(q_latent_BHC.dtype) if rows else torch.zeros_like(q_latent_BHC)
