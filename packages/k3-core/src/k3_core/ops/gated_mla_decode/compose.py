"""gated_mla_decode from the ops that it joins. Legend as in the op's signature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_core.ops.gated_mla_decode import GatedMlaDecode


def decode_by(
    rms_norm: Callable[..., Tensor],
    linear: Callable[..., Tensor],
    mla_decode: Callable[..., Tensor],
) -> GatedMlaDecode:
    """The op on implementations of the three."""

    @torch.no_grad()
    def gated_mla_decode(
        q_BQ: Tensor,
        latent_BX: Tensor,
        gate_BHV: Tensor,
        q_norm_Q: Tensor,
        q_weight_HDQ: Tensor,
        kv_norm_C: Tensor,
        kv_weight_HEC: Tensor,
        *,
        pages_PLX: Tensor,
        page_table_BM: Tensor,
        lengths_B: Tensor,
        scale: float,
        eps: float,
    ) -> Tensor:
        check_shapes(q_BQ, latent_BX, gate_BHV, q_weight_HDQ, kv_weight_HEC, pages_PLX)
        num_heads, num_latent = kv_weight_HEC.shape[0], kv_weight_HEC.shape[2]
        num_shared, num_values = latent_BX.shape[1] - num_latent, gate_BHV.shape[2]
        latent_BC, shared_BR = latent_BX.split((num_latent, num_shared), dim=-1)
        row_BX = torch.cat((rms_norm(latent_BC, kv_norm_C, eps=eps), shared_BR), dim=-1)
        position_B, num_tokens = lengths_B.long() - 1, pages_PLX.shape[1]
        page_B1 = page_table_BM.long().gather(1, (position_B // num_tokens)[:, None])
        pages_PLX[page_B1[:, 0], position_B % num_tokens] = row_BX.to(pages_PLX.dtype)
        q_BHD = linear(rms_norm(q_BQ, q_norm_Q, eps=eps), q_weight_HDQ.flatten(0, 1))
        q_BHD = q_BHD.unflatten(-1, (num_heads, -1))
        q_nope_BHN, q_shared_BHR = q_BHD.split((q_BHD.shape[2] - num_shared, num_shared), dim=-1)
        w_key_HNC, w_value_HVC = kv_weight_HEC.split((q_nope_BHN.shape[2], num_values), dim=1)
        o_BHC = mla_decode(
            torch.bmm(q_nope_BHN.transpose(0, 1), w_key_HNC).transpose(0, 1),
            q_shared_BHR,
            pages_PLX,
            page_table_BM,
            lengths_B,
            scale=scale,
        )
        o_HBV = torch.bmm(o_BHC.transpose(0, 1), w_value_HVC.transpose(1, 2))
        # The product has the layout of its first factor: the other one lies by heads, and a copy of
        # it is spared.
        return torch.sigmoid(gate_BHV) * o_HBV.transpose(0, 1)

    return gated_mla_decode


def check_shapes(
    q_BQ: Tensor,
    latent_BX: Tensor,
    gate_BHV: Tensor,
    q_weight_HDQ: Tensor,
    kv_weight_HEC: Tensor,
    pages_PLX: Tensor,
) -> None:
    """Raise ValueError for what does not fit the weights; norms and page tables are others'."""
    (num_heads, num_q, rank), (_, num_kv, num_latent) = q_weight_HDQ.shape, kv_weight_HEC.shape
    num_rows, num_values = len(q_BQ), gate_BHV.shape[-1]
    width = num_latent + num_q - (num_kv - num_values)
    wanted = {
        "q": (q_BQ, (num_rows, rank)),
        "the latent": (latent_BX, (num_rows, width)),
        "the gate": (gate_BHV, (num_rows, num_heads, num_values)),
        "the weight of keys and values": (kv_weight_HEC, (num_heads, num_kv, num_latent)),
        "pages": (pages_PLX, (*pages_PLX.shape[:2], width)),
    }
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(
                f"gated_mla_decode: {name} must be {list(shape)} for query weights "
                f"{list(q_weight_HDQ.shape)}, key and value weights {list(kv_weight_HEC.shape)} "
                f"and {num_values} values a head, got {list(x.shape)}"
            )
