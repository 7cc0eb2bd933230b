"""Multi-token prediction layer (architecture 4): Gated MLA and LatentMoE on a plain residual.

Position t reads the model's output mix of t and the embedding of token t + 1 (zeroed at position
0 of a sequence) and predicts token t + 2. T packed tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.model.parts import Parts
from k3_core.modules import Linear, RMSNorm


class SharedHead(nn.Module):
    """`shared_head.norm` and, unless it is the model's own, `shared_head.head`."""

    def __init__(
        self,
        config: TextConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **like)
        if not config.mtp_share_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, **like)


class MTPLayer(nn.Module):
    """One extra layer behind the decoder, under the layer index that follows it."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        parts: Parts,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        model, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.enorm = RMSNorm(model, eps, parts.ops, **like)
        self.hnorm = RMSNorm(model, eps, parts.ops, **like)
        self.eh_proj = Linear(2 * model, model, parts.ops, **like)
        self.self_attn = parts.get("attention", "gated_mla")(config, layer, parts.ops, **like)
        moe = parts.get("moe", "latent_moe")
        self.ffn_name: str = moe.attribute
        self.add_module(self.ffn_name, moe(config, layer, parts.ops, **like))
        self.input_layernorm = RMSNorm(model, eps, parts.ops, **like)
        self.post_attention_layernorm = RMSNorm(model, eps, parts.ops, **like)
        self.shared_head = SharedHead(config, **like)
        if not config.mtp_share_embeddings:
            self.embed_tokens = Linear(model, config.vocab_size, **like)

    def forward(self, next_embeds_TD: Tensor, mix_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """Block output [T, D] before `shared_head.norm`; also the next step's `mix_TD`."""
        next_embeds_TD = next_embeds_TD.masked_fill(batch.is_first_T[:, None], 0.0)
        x_TD = self.eh_proj(torch.cat((self.enorm(next_embeds_TD), self.hnorm(mix_TD)), dim=-1))
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), batch)
        out_TD, _ = getattr(self, self.ffn_name)(self.post_attention_layernorm(x_TD), batch)
        return x_TD + out_TD
