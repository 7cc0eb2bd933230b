"""Reference of mla_decode.

B sequences, H heads, C latent (512), R shared key (64), X = C + R cached values a token,
P pages, L tokens a page, M pages a sequence.
"""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Softmax(scale (q_latent . c + q_rope . k_s)) . c over the first `lengths` cached tokens.

    `q_latent` is q_nope W_UK, so keys and values are both the cached latent c. Entry j of a
    row of `page_table` holds tokens j L .. (j+1) L - 1. Returns o_latent [B, H, C] in the dtype
    of `q_latent`; a sequence of length 0 gives zeros. Softmax in float32.
    """
    check_widths(q_latent_BHC, q_rope_BHR, pages_PLX)
    num_latent = q_latent_BHC.shape[-1]
    dtype = math_dtype(q_latent_BHC)
    cached_BSX = pages_PLX[page_table_BM].flatten(1, 2).to(dtype)
    q_BHX = torch.cat((q_latent_BHC, q_rope_BHR), dim=-1).to(dtype)
    scores_BHS = torch.einsum("bhx,bsx->bhs", q_BHX, cached_BSX) * scale
    is_past = torch.arange(cached_BSX.shape[1], device=lengths_B.device) >= lengths_B[:, None]
    scores_BHS = scores_BHS.masked_fill(is_past[:, None], float("-inf"))
    weights_BHS = scores_BHS.softmax(-1).nan_to_num(0.0)
    latent_BSC = cached_BSX[..., :num_latent].masked_fill(is_past[..., None], 0.0)
    return torch.einsum("bhs,bsc->bhc", weights_BHS, latent_BSC).to(q_latent_BHC.dtype)


def check_widths(q_latent_BHC: Tensor, q_rope_BHR: Tensor, pages_PLX: Tensor) -> None:
    """Raise ValueError when a cached token is not as wide as the two queries together."""
    num_latent, num_shared = q_latent_BHC.shape[-1], q_rope_BHR.shape[-1]
    if pages_PLX.shape[-1] != num_latent + num_shared:
        raise ValueError(
            f"mla_decode: pages hold {pages_PLX.shape[-1]} values a token, the queries need "
            f"{num_latent} + {num_shared}"
        )
