"""One decoder layer and the stack of them (architecture 3.4).

T packed tokens, R of them, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.model.mtp import MTPLayer
from k3_core.model.outputs import Recorder
from k3_core.model.parts import Parts
from k3_core.modules import Linear, RMSNorm
from k3_core.residual.base import DepthMixer, DepthState, Site


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each reading the depth through the mixer."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        parts: Parts,
        mixer: DepthMixer,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        model, eps = config.hidden_size, config.rms_norm_eps
        self.layer, self.mixer = layer, mixer
        attention = parts.get("attention", "kda" if config.is_kda_layer(layer) else "gated_mla")
        self.self_attn = attention(config, layer, parts.ops, **like)
        feed_forward = parts.get("moe", "latent_moe" if config.is_moe_layer(layer) else "dense_mlp")
        self.ffn_name: str = feed_forward.attribute
        self.add_module(self.ffn_name, feed_forward(config, layer, parts.ops, **like))
        self.input_layernorm = RMSNorm(model, eps, parts.ops, **like)
        self.post_attention_layernorm = RMSNorm(model, eps, parts.ops, **like)
        if mixer.has_sites:
            self.self_attention_res_norm = RMSNorm(model, eps, **like)
            self.self_attention_res_proj = Linear(model, 1, **like)
            self.mlp_res_norm = RMSNorm(model, eps, **like)
            self.mlp_res_proj = Linear(model, 1, **like)

    def forward(
        self,
        state: DepthState,
        batch: SequenceBatch,
        recorder: Recorder,
        rows_R: Tensor | None = None,
    ) -> None:
        """Read, compute and write both sublayers; `state` is updated.

        With `rows` only these tokens go on behind the attention.
        """
        name = f"layers.{self.layer}"
        x_TD = self._read(state, recorder, is_mlp=False)
        out_TD = self.self_attn(x_TD, batch)
        recorder.add(f"{name}.attn_out", out_TD)
        self.mixer.write(state, out_TD)
        if rows_R is not None:
            state.keep(rows_R)
        x_TD = self._read(state, recorder, is_mlp=True)
        out_TD, routes = getattr(self, self.ffn_name)(x_TD, batch)
        recorder.add(f"{name}.mlp_out", out_TD)
        recorder.add_routes(self.layer, routes)
        self.mixer.write(state, out_TD)
        if recorder.is_active:
            recorder.add(f"{name}.prefix_sum", state.prefix)

    def _read(self, state: DepthState, recorder: Recorder, is_mlp: bool) -> Tensor:
        """The normed input of a sublayer; the mix before the norm only where it is recorded."""
        site = self._site("mlp_res" if is_mlp else "self_attention_res")
        norm = self.post_attention_layernorm if is_mlp else self.input_layernorm
        read_normed = getattr(self.mixer, "read_normed", None)
        if read_normed is not None and not recorder.is_active:
            x_TD: Tensor = read_normed(state, self.layer, site, norm, is_mlp)
            return x_TD
        read = self.mixer.read_mlp if is_mlp else self.mixer.read_attention
        h_TD = read(state, self.layer, site)
        recorder.add(f"layers.{self.layer}.{'mlp' if is_mlp else 'attn'}_mix", h_TD)
        return norm(h_TD)

    def _site(self, name: str) -> Site | None:
        if not self.mixer.has_sites:
            return None
        return Site(getattr(self, f"{name}_norm"), getattr(self, f"{name}_proj"))


class Decoder(nn.Module):
    """Embedding, layers, output mix and final norm: the `model.` part of the text model."""

    def __init__(
        self,
        config: TextConfig,
        parts: Parts,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        model, eps = config.hidden_size, config.rms_norm_eps
        self.num_layers = config.num_hidden_layers
        self.mixer: DepthMixer = parts.depth_mixer(config)
        self.embed_tokens = Linear(model, config.vocab_size, **like)
        layers: list[nn.Module] = [
            DecoderLayer(config, i, parts, self.mixer, **like) for i in range(self.num_layers)
        ]
        layers += [
            MTPLayer(config, self.num_layers + i, parts, **like)
            for i in range(config.num_nextn_predict_layers)
        ]
        self.layers = nn.ModuleList(layers)
        if self.mixer.has_sites:
            self.output_attn_res_norm = RMSNorm(model, eps, **like)
            self.output_attn_res_proj = Linear(model, 1, **like)
        self.norm = RMSNorm(model, eps, parts.ops, **like)

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """Token embeddings [T, D]; raises IndexError for an id outside the vocabulary."""
        weight = self.embed_tokens.weight
        try:
            return nn.functional.embedding(input_ids_T, weight)
        except IndexError:  # on a CPU; a GPU stops at the next call that waits for it
            low, high = (int(bound) for bound in input_ids_T.aminmax())
            message = f"ids are in {low}..{high}, the vocabulary is 0..{len(weight) - 1}"
            raise IndexError(message) from None

    def forward(
        self,
        embeds_TD: Tensor,
        batch: SequenceBatch,
        recorder: Recorder,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output mix before the final norm, and after it; both [T, D], or [R, D] of the `rows`."""
        recorder.add("inputs_embeds", embeds_TD)
        state = self.mixer.start(embeds_TD)
        last = self.num_layers - 1
        for layer in self.layers[:last]:
            layer(state, batch, recorder)
        # No later layer mixes tokens: the others are of no use behind its attention.
        self.layers[last](state, batch, recorder, rows_R)
        site = None
        if self.mixer.has_sites:
            site = Site(self.output_attn_res_norm, self.output_attn_res_proj)
        mix_TD = self.mixer.read_output(state, site)
        hidden_TD = self.norm(mix_TD)
        recorder.add("output_mix", mix_TD)
        recorder.add("final_norm", hidden_TD)
        return mix_TD, hidden_TD
