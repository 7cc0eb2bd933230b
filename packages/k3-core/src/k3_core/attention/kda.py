"""Kimi Delta Attention (report 1.1, architecture 3.2).

T tokens, D model width, H heads, K = V head dim, C = H K channels, N sequences, W conv width (of
B rows in a decode step: tokens a row), J = W - 1 remembered inputs, E checkpoints, G = C or K.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.cache.base import KDASpec
from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.modules import Linear, Projections, RMSNorm, Stacked
from k3_core.ops import OpSet


class ShortConv(nn.Module):
    """Weight [C, 1, W] of a depthwise causal convolution; the op applies it."""

    def __init__(self, channels: int, width: int, *, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device))


class KimiDeltaAttention(nn.Module):
    """Gated delta rule with a decay per channel, short convolutions and an output gate."""

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
        linear = config.linear_attn_config
        self.layer, self.ops = layer, ops
        self.num_heads, self.head_dim = linear.num_heads, linear.head_dim
        self.conv_width = linear.short_conv_kernel_size
        self.lower_bound = linear.gate_lower_bound
        model, channels = config.hidden_size, linear.num_heads * linear.head_dim
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = Linear(model, channels, ops, **like)
        self.k_proj = Linear(model, channels, ops, **like)
        self.v_proj = Linear(model, channels, ops, **like)
        # Taps, decay and output norm stay float32 in every precision (architecture 2.1).
        self.q_conv1d = ShortConv(channels, self.conv_width, device=device)
        self.k_conv1d = ShortConv(channels, self.conv_width, device=device)
        self.v_conv1d = ShortConv(channels, self.conv_width, device=device)
        self.f_a_proj = Linear(model, linear.head_dim, ops, **like)
        self.f_b_proj = Linear(linear.head_dim, channels, ops, **like)
        self.b_proj = Linear(model, linear.num_heads, ops, **like)
        self.A_log = nn.Parameter(torch.empty(linear.num_heads, device=device))
        self.dt_bias = nn.Parameter(torch.empty(channels, device=device))
        self.has_full_rank_gate = linear.use_full_rank_gate
        if self.has_full_rank_gate:
            self.g_proj = Linear(model, channels, ops, **like)
        else:
            self.g_a_proj = Linear(model, linear.head_dim, ops, **like)
            self.g_b_proj = Linear(linear.head_dim, channels, ops, **like)
        self.o_norm = RMSNorm(linear.head_dim, config.rms_norm_eps, device=device)
        self.o_proj = Linear(channels, model, ops, **like)
        # What reads the input: q, k and v; the decay's first factor; beta; the output gate.
        gate = "g_proj" if self.has_full_rank_gate else "g_a_proj"
        qkv = "q_proj", "k_proj", "v_proj"
        self._read_input = Projections(self, qkv, ("f_a_proj",), ("b_proj",), (gate,))
        self._taps = Stacked(self, "q_conv1d", "k_conv1d", "v_conv1d")

    def cache_spec(self) -> KDASpec:
        """State [H, V, K] and the last W - 1 inputs of the three convolutions."""
        channels = 3 * self.num_heads * self.head_dim
        return KDASpec(self.num_heads, self.head_dim, channels, self.conv_width)

    def forward(self, x_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """[T, D] -> [T, D]."""
        qkv_TC, decay_TK, beta_TH, gate_TG = self._read_input(x_TD)
        decay_THK = self._heads(self.f_b_proj(decay_TK))
        inputs = [qkv_TC, decay_THK, beta_TH, self._heads(self._output_gate(gate_TG))]
        split = batch.num_decode_tokens
        parts = []
        if split:
            own = inputs if batch.is_decode else [x[:split] for x in inputs]
            parts.append(self._decode(own, batch))
        if split == 0 or not batch.is_decode:
            parts.append(self._prefill([x[split:] for x in inputs], batch))
        y_THK = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(y_THK.flatten(1))

    def _output_gate(self, gate_TG: Tensor) -> Tensor:
        return gate_TG if self.has_full_rank_gate else self.g_b_proj(gate_TG)

    def _heads(self, x_TC: Tensor) -> Tensor:
        return x_TC.unflatten(-1, (self.num_heads, self.head_dim))

    def _decay(self) -> tuple[Tensor, Tensor]:
        return self.A_log, self.dt_bias.view(self.num_heads, self.head_dim)

    def _convolved(
        self, qkv_TC: Tensor, batch: SequenceBatch, offsets: tuple[tuple[int, ...], ...] | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v after the convolution and SiLU, one call for the three; windows at offsets."""
        cached = None if batch.cache is None else batch.cache.conv_state(self.layer)
        initial_NCJ = None if cached is None else cached[batch.slots_N]
        y_TC, final_NCJ = self.ops.short_conv(
            qkv_TC,
            self._taps(),
            cu_seqlens_N1=batch.cu_seqlens_N1,
            seqlens=batch.seqlens,
            initial_state_NCW=initial_NCJ,
            output_final_state=cached is not None,
        )
        windows_ECJ = None
        if cached is not None and initial_NCJ is not None:
            cached[batch.slots_N] = final_NCJ.to(cached.dtype)
            if offsets is not None:
                windows_ECJ = _windows(qkv_TC, initial_NCJ, batch.seqlens, offsets)
        return [self._heads(part) for part in y_TC.chunk(3, dim=-1)], windows_ECJ

    def _prefill(self, inputs: list[Tensor], batch: SequenceBatch) -> Tensor:
        """The sequences behind the decoding ones; their checkpoints are put on the way."""
        qkv_TC, decay_THK, beta_TH, gate_THV = inputs
        part, checkpoints = batch.prefilling, batch.checkpoints
        offsets = None if checkpoints is None else checkpoints.offsets[batch.num_decode :]
        qkv, windows_ECJ = self._convolved(qkv_TC, part, offsets)
        cached = None if part.cache is None else part.cache.kda_state(self.layer)
        states_EHVK = None
        if cached is not None and windows_ECJ is not None:
            states_EHVK = cached.new_empty(len(windows_ECJ), *cached.shape[1:])
        o_THV, final_NHVK = self.ops.kda_chunk(
            *qkv,
            decay_THK,
            beta_TH,
            *self._decay(),
            lower_bound=self.lower_bound,
            cu_seqlens_N1=part.cu_seqlens_N1,
            seqlens=part.seqlens,
            initial_state_NHVK=None if cached is None else cached[part.slots_N],
            output_final_state=cached is not None,
            checkpoint_offsets=None if states_EHVK is None else offsets,
            checkpoints_EHVK=states_EHVK,
        )
        if cached is not None:
            cached[part.slots_N] = final_NHVK
        if checkpoints is not None and states_EHVK is not None and windows_ECJ is not None:
            checkpoints.put(self.layer, states_EHVK, windows_ECJ)
        norm = self.o_norm
        y_THV: Tensor = self.ops.gated_rms_norm(o_THV, norm.weight, gate_THV, eps=norm.eps)
        return y_THV

    def _decode(self, inputs: list[Tensor], batch: SequenceBatch) -> Tensor:
        """The decoding sequences. In a verify step states wait for `_replay` (report 1.8)."""
        part = batch.decoding
        assert part.cache is not None
        state_SHVK = part.cache.kda_state(self.layer)
        x_BWC, gate_BWHK, beta_BWH, out_gate_BWHV = (part.rows(x) for x in inputs)
        keys_BWHK = writes_BWHV = None
        if batch.is_verify:
            keys_BWHK = torch.empty_like(gate_BWHK)
            writes_BWHV = torch.empty_like(out_gate_BWHV, dtype=state_SHVK.dtype)
            records = (keys_BWHK, gate_BWHK, writes_BWHV)
            batch.replays.append(partial(self._replay, part, records, x_BWC))
        y_BWHV = self.ops.kda_decode(
            x_BWC,
            self._taps(),
            gate_BWHK,
            beta_BWH,
            *self._decay(),
            out_gate_BWHV,
            self.o_norm.weight,
            state_SHVK=state_SHVK,
            window_SCR=part.cache.conv_state(self.layer),
            slots_B=part.slots_N,
            lower_bound=self.lower_bound,
            eps=self.o_norm.eps,
            keys_BWHK=keys_BWHK,
            writes_BWHV=writes_BWHV,
        )
        return part.tokens(y_BWHV)

    def _replay(
        self,
        batch: SequenceBatch,
        records: tuple[Tensor, Tensor, Tensor],
        x_BWC: Tensor,
        num_accepted_B: Tensor,
    ) -> None:
        """Applies the accepted tokens of a verify step: `records` are its k, gate and writes."""
        assert batch.cache is not None
        self.ops.kda_replay(
            *records,
            *self._decay(),
            state_SHVK=batch.cache.kda_state(self.layer),
            slots_B=batch.slots_N,
            num_accepted_B=num_accepted_B,
            lower_bound=self.lower_bound,
            x_BWC=x_BWC,
            window_SCR=batch.cache.conv_state(self.layer),
        )


def _windows(
    qkv_TC: Tensor,
    initial_NCJ: Tensor,
    seqlens: tuple[int, ...],
    offsets: tuple[tuple[int, ...], ...],
) -> Tensor:
    """Last J inputs of the convolutions after each checkpoint's token, oldest first."""
    width = initial_NCJ.shape[-1]
    windows = [initial_NCJ[:0]]
    for x_LC, old_CJ, own in zip(qkv_TC.split(seqlens), initial_NCJ, offsets, strict=True):
        for t in own:
            new = x_LC[max(t - width, 0) : t].t().to(old_CJ.dtype)
            windows.append(torch.cat((old_CJ[:, t:], new), dim=1)[None])
    return torch.cat(windows)
