"""Results of mla_decode without values, for graphs."""

from __future__ import annotations

from torch import Tensor


def meta(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As the latent queries."""
    return q_latent_BHC.new_empty(q_latent_BHC.shape)
