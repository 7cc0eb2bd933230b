"""Gated Multi-head Latent Attention without positions (report 2, architecture 3.3).

T tokens, D model width, H heads, N nope dim, R shared key dim, V value dim, C kv latent,
X = C + R cached values a token, Q rank of the queries, G = H V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.cache.base import MLASpec
from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.modules import Linear, Projections, RMSNorm
from k3_core.ops import OpSet


class GatedMLA(nn.Module):
    """Low-rank queries, keys and values, one un-rotated key part shared by the heads, a gate."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.ops = layer, ops
        self.num_heads = config.num_attention_heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim, self.latent_dim = config.v_head_dim, config.kv_lora_rank
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        self.observer: Callable[[Tensor], None] | None = None
        """Called in every training forward pass, in a recomputation of it too, with the largest
        scaled score [H] of each head; QK-Clip sets it."""
        model, eps = config.hidden_size, config.mla_norm_eps
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_a_proj = Linear(model, config.q_lora_rank, ops, **like)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, ops, **like)
        self.q_b_proj = Linear(
            config.q_lora_rank, self.num_heads * (self.nope_dim + self.rope_dim), ops, **like
        )
        self.kv_a_proj_with_mqa = Linear(model, self.latent_dim + self.rope_dim, ops, **like)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, eps, ops, **like)
        self.kv_b_proj = Linear(
            self.latent_dim, self.num_heads * (self.nope_dim + self.value_dim), ops, **like
        )
        self.g_proj = Linear(model, self.num_heads * self.value_dim, ops, **like)
        self.o_proj = Linear(self.num_heads * self.value_dim, model, ops, **like)
        # First factors of queries, of keys and values; the output gate.
        names = "q_a_proj", "kv_a_proj_with_mqa", "g_proj"
        self._read_input = Projections(self, *((name,) for name in names))

    def cache_spec(self) -> MLASpec:
        """Normed latent and shared key of each token."""
        return MLASpec(self.latent_dim + self.rope_dim)

    def forward(self, x_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """[T, D] -> [T, D]."""
        inputs = self._read_input(x_TD)
        split = batch.num_decode_tokens
        parts = []
        if split:
            parts.append(self._decode([x[:split] for x in inputs], batch.decoding))
        if split == 0 or not batch.is_decode:
            parts.append(self._prefill([x[split:] for x in inputs], batch.prefilling))
        y_THV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(y_THV.flatten(1))

    def _normed(self, latent_TX: Tensor) -> Tensor:
        latent_TC, shared_TR = latent_TX.split((self.latent_dim, self.rope_dim), dim=-1)
        return torch.cat((self.kv_a_layernorm(latent_TC), shared_TR), dim=-1)

    def expand(self, latent_SX: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, H, N + R] and values [S, H, V] of cached latents [S, X]."""
        latent_SC, shared_SR = latent_SX.split((self.latent_dim, self.rope_dim), dim=-1)
        kv_SHD = self.kv_b_proj(latent_SC).unflatten(-1, (self.num_heads, -1))
        nope_SHN, v_SHV = kv_SHD.split((self.nope_dim, self.value_dim), dim=-1)
        shared_SHR = shared_SR[:, None].expand(-1, self.num_heads, -1)
        return torch.cat((nope_SHN, shared_SHR.to(nope_SHN.dtype)), dim=-1), v_SHV

    def _prefill(self, inputs: list[Tensor], batch: SequenceBatch) -> Tensor:
        """Gated outputs [T, H, V] of whole stretches of sequences, by expanded keys and values."""
        q_TQ, latent_TX, gate_TG = inputs
        q_THD = self.q_b_proj(self.q_a_layernorm(q_TQ)).unflatten(-1, (self.num_heads, -1))
        latent_TX = self._normed(latent_TX)
        if batch.cache is not None:
            batch.cache.append_latent(self.layer, batch, latent_TX)
        k_SHD, v_SHV = self.expand(self._whole_sequences(latent_TX, batch))
        o_THV = self._attend(q_THD, k_SHD, v_SHV, batch)
        return torch.sigmoid(gate_TG).unflatten(-1, (self.num_heads, self.value_dim)) * o_THV

    def _attend(self, q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, batch: SequenceBatch) -> Tensor:
        attend = partial(
            self.ops.mla_prefill,
            q_THD,
            k_SHD,
            v_SHV,
            scale=self.scale,
            cu_seqlens_q=batch.cu_seqlens_N1,
            cu_seqlens_k=batch.cu_total_N1,
            seqlens_q=batch.seqlens,
            seqlens_k=batch.total_lengths,
        )
        if self.observer is None or not self.training:
            return attend()
        o_THV, largest_H = attend(return_max=True)
        self.observer(largest_H)
        return o_THV

    @torch.no_grad()
    def scale_scores(self, factor_H: Tensor) -> None:
        """Multiply the scores of each head by a positive factor [H], in the weights (report 5).

        A score is a part of this head's query and key, which share the factor, and a part of its
        query and the key that all heads share, where only the query can take it.
        """
        root_H11, factor_H11 = factor_H.sqrt()[:, None, None], factor_H[:, None, None]
        query_HDQ = self.q_b_proj.weight.view(self.num_heads, -1, self.q_b_proj.weight.shape[-1])
        query_HDQ[:, : self.nope_dim].mul_(root_H11)
        query_HDQ[:, self.nope_dim :].mul_(factor_H11)
        kv_HDC = self.kv_b_proj.weight.view(self.num_heads, -1, self.latent_dim)
        kv_HDC[:, : self.nope_dim].mul_(root_H11)

    def _whole_sequences(self, latent_TX: Tensor, batch: SequenceBatch) -> Tensor:
        """Latents of the cached tokens and the new ones, packed."""
        if batch.cache is None or not any(batch.starts):
            return latent_TX
        pages_PLX, table_NM = batch.cache.latent_pages(self.layer, batch)
        rows = [
            pages_PLX[table].flatten(0, 1)[:length]
            for table, length in zip(table_NM, batch.total_lengths, strict=True)
        ]
        return torch.cat(rows).to(latent_TX.dtype)

    def _decode(self, inputs: list[Tensor], batch: SequenceBatch) -> Tensor:
        """Gated outputs [T, H, V] of one token a row: absorbed form, in the latent space, without
        expanded keys or values."""
        q_TQ, latent_TX, gate_TG = inputs
        assert batch.cache is not None
        pages_PLX, table_NM = batch.cache.latent_pages(self.layer, batch)
        lengths = batch.lengths_N
        if batch.is_verify:  # a row a token, each seeing the tokens up to its own
            table_NM, lengths = table_NM[batch.sequence_T], batch.positions_T + 1
        y_THV: Tensor = self.ops.gated_mla_decode(
            q_TQ,
            latent_TX,
            gate_TG.unflatten(-1, (self.num_heads, self.value_dim)),
            self.q_a_layernorm.weight,
            self.q_b_proj.weight.unflatten(0, (self.num_heads, -1)),
            self.kv_a_layernorm.weight,
            self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)),
            pages_PLX=pages_PLX,
            page_table_BM=table_NM,
            lengths_B=lengths,
            scale=self.scale,
            eps=self.kv_a_layernorm.eps,
        )
        return y_THV
