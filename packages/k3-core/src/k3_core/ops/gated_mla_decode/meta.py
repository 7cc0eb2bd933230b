"""Results of gated_mla_decode without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op.arguments import Written


def meta(
    q_BQ: Tensor,
    latent_BX: Tensor,
    gate_BHV: Tensor,
    q_norm_Q: Tensor,
    q_weight_HDQ: Tensor,
    kv_norm_C: Tensor,
    kv_weight_HEC: Tensor,
    *,
    pages_PLX: Written,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
    eps: float,
) -> Tensor:
    """As the gate."""
    return gate_BHV.new_empty(gate_BHV.shape)
