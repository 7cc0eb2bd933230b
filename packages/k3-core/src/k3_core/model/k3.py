"""K3ForConditionalGeneration: text model, vision tower and projector behind one forward.

Inside everything is packed (T tokens of N sequences, `SequenceBatch`); `__call__` is the front
for padded [B, T] input. State-dict keys are the released checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3_core.cache.base import LayerSpec, state_dtype
from k3_core.config import K3Config
from k3_core.model.batch import SequenceBatch
from k3_core.model.decoder import Decoder
from k3_core.model.front import Packing, packing_of
from k3_core.model.init import init_parameters
from k3_core.model.outputs import K3Output, PackedOutput, Recorder
from k3_core.model.parts import Parts
from k3_core.model.training import training_loss
from k3_core.modules import Linear
from k3_core.moe.experts import ExpertBank
from k3_core.vision import (
    Projector,
    VisionTower,
    encode_images,
    expand_placeholders,
    fill_placeholders,
    merge_batch,
)

if TYPE_CHECKING:
    from k3_core.cache.contiguous import ContiguousCache


class LanguageModel(nn.Module):
    """`model` (the decoder) and `lm_head`."""

    def __init__(self, config: K3Config, parts: Parts, **like: Any) -> None:
        super().__init__()
        self.model = Decoder(config.text, parts, **like)
        self.lm_head = Linear(config.text.hidden_size, config.text.vocab_size, parts.ops, **like)


class K3ForConditionalGeneration(nn.Module):
    """A K3 model of any size, assembled from the registered implementations.

    `impl_overrides` is an `[impl]` table (`{"attention.kda": "my_plugin.kda"}`). Parameters are
    initialised by `k3_core.model.init`; on device "meta" they have no values, and `ops_device`
    says where they will be, for the choice of implementations. `stored_dtypes` (exceptions from
    the released dtypes) and `tokenizer_source` are set by loading and used by saving.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        impl_overrides: Mapping[str, str] | None = None,
        generator: torch.Generator | None = None,
        initialize: bool = True,
        ops_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.stored_dtypes: dict[str, str] = {}
        self.tokenizer_source: Path | None = None
        self.impl_overrides = dict(impl_overrides or {})
        self._parts = Parts(
            _ops_device(ops_device or device), _dtype_name(dtype), self.impl_overrides
        )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.language_model = LanguageModel(config, self._parts, **like)
        self.vision_tower = self.mm_projector = None
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision, **like)
            self.mm_projector = Projector(config.vision, **like)
        if initialize:
            init_parameters(self, config.text.initializer_range, generator)

    # -- loading and saving ---------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        experts: str = "packed",
        impl_overrides: Mapping[str, str] | None = None,
    ) -> K3ForConditionalGeneration:
        """Load a folder in the released layout, or a bundled model by its name (`k3-nano`).

        `dtype="auto"` follows config.json; the float32 set stays float32 in any case.
        `experts` keeps MXFP4 experts "packed" in memory or makes them "dequantized".
        """
        from k3_core.checkpoint import load_pretrained

        return load_pretrained(
            cls,
            path_or_name,
            dtype=dtype,
            device=device,
            experts=experts,
            impl_overrides=impl_overrides,
        )

    def save_pretrained(
        self, directory: str | Path, max_shard_size: int | str = "5GB", tokenizer: Any = None
    ) -> None:
        """Write config.json, generation_config.json, safetensors shards and tokenizer files."""
        from k3_core.checkpoint import save_pretrained

        save_pretrained(self, directory, max_shard_size=max_shard_size, tokenizer=tokenizer)

    # -- parts ----------------------------------------------------------------------------

    @property
    def resolutions(self) -> dict[str, Any]:
        """Which implementation was chosen for each part, with the reasons."""
        return self._parts.resolutions

    @property
    def ops(self) -> Any:
        """The resolved ops."""
        return self._parts.ops

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.language_model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.language_model.model.embed_tokens.weight.dtype

    def bind_ops(self, device: str, dtype: str, overrides: Mapping[str, str] | None = None) -> None:
        """Resolve the ops again, after a move to another device or for another dtype."""
        parts = Parts(_ops_device(device), dtype, {**self.impl_overrides, **(overrides or {})})
        for module in (*self.modules(), self.language_model.model.mixer):
            if hasattr(module, "ops") and module is not self:
                module.ops = parts.ops
        kept = {
            key: value
            for key, value in self._parts.resolutions.items()
            if not key.startswith("kernel.")
        }
        parts.resolutions.update(kept)
        self._parts = parts

    def expert_banks(self) -> Iterable[ExpertBank]:
        """All stacks of routed experts."""
        return (module for module in self.modules() if isinstance(module, ExpertBank))

    def pack_experts(self) -> None:
        """Quantise the routed experts to MXFP4 in place."""
        for bank in self.expert_banks():
            bank.pack(self.ops.mx_quantize)

    def new_cache(self, batch_size: int, max_length: int | None = None) -> ContiguousCache:
        """An empty cache of `batch_size` slots for this model, updated in place by calls."""
        specs: dict[int, LayerSpec] = {
            index: layer.self_attn.cache_spec()  # type: ignore[union-attr, operator]
            for index, layer in enumerate(self.language_model.model.layers)
        }
        cache = self._parts.get("cache", "contiguous")
        return cache(specs, batch_size, max_length=max_length, device=self.device, dtype=self.dtype)

    # -- forward --------------------------------------------------------------------------

    def forward_packed(
        self,
        input_ids_T: Tensor | None,
        batch: SequenceBatch,
        *,
        inputs_embeds_TD: Tensor | None = None,
        logit_rows: Tensor | None = None,
        output_hidden_states: bool = False,
        output_logits: bool = True,
        is_cut: bool = False,
    ) -> PackedOutput:
        """One pass over packed tokens: training, prefill, decode or a mixture (design 4).

        Give ids [T] or embeddings [T, D]. `logit_rows` (int64) selects the tokens whose logits
        are wanted; with `is_cut` nothing of the others is computed behind the last attention. The
        batch's cache is read, written and advanced; of a verify batch, call `batch.accept` next.
        """
        decoder = self.language_model.model
        recorder = Recorder(output_hidden_states)
        if is_cut and (logit_rows is None or output_hidden_states or batch.routes):
            raise ValueError("is_cut needs logit_rows, and has no hidden states or replayed routes")
        self._check_routes(batch)
        if batch.cache is not None:
            batch.cache.check_room(batch.total_lengths)
        if inputs_embeds_TD is None:
            inputs_embeds_TD = self._embed_packed(self._checked_ids(input_ids_T, batch), batch)
        elif len(inputs_embeds_TD) != batch.num_tokens:
            raise ValueError(
                f"{len(inputs_embeds_TD)} embeddings for a batch of {batch.num_tokens} tokens"
            )
        rows_R = logit_rows if is_cut else None
        mix_TD, hidden_TD = decoder(inputs_embeds_TD, batch, recorder, rows_R)
        logits = None
        if output_logits:
            rows = hidden_TD if logit_rows is None or is_cut else hidden_TD[logit_rows]
            logits = self.language_model.lm_head(rows, state_dtype(self.dtype))
            recorder.add("logits", logits)
        if batch.cache is not None:
            first = batch.num_decode if batch.is_verify else 0  # those wait for `accept`
            batch.cache.advance(batch.slots[first:], batch.seqlens[first:])
        return PackedOutput(logits, hidden_TD, mix_TD, recorder.values)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        cache: ContiguousCache | None = None,
        output_hidden_states: bool = False,
    ) -> K3Output:
        """Padded front: `input_ids` int64 [B, T], one placeholder id an image.

        `attention_mask` [B, T] (or [B, cached + T]) is 1 at real tokens, padding on either side.
        With images the output has the expanded length. Row b of the batch uses slot b of `cache`.
        """
        packing = packing_of(input_ids, attention_mask)
        if pixel_values is None and grid_thws is not None:
            raise ValueError("grid_thws without pixel_values; pass both or neither")
        if pixel_values is None:
            embeds_PD = self.language_model.model.embed(packing.pack(input_ids))
        else:
            packing, embeds_PD = self._merged(input_ids, packing, pixel_values, grid_thws)
        batch = SequenceBatch.from_lengths(packing.seqlens, device=self.device, cache=cache)
        out = self.forward_packed(
            None,
            batch,
            inputs_embeds_TD=embeds_PD,
            output_hidden_states=output_hidden_states,
        )
        assert out.logits is not None
        mask_BT = packing.mask_BT.to(torch.int64)
        states = out.hidden_states
        if states is not None:
            states = {k: v if ".topk_" in k else packing.unpack(v) for k, v in states.items()}
            states["attention_mask"] = mask_BT
        return K3Output(packing.unpack(out.logits), mask_BT, states)

    def encode_images(self, pixel_values: Tensor, grid_thws: Tensor | None) -> list[Tensor]:
        """Features [n_i, D] of each item in the text model's space."""
        if self.vision_tower is None or self.mm_projector is None:
            raise ValueError("this model has no vision tower; its config has no vision_config")
        if grid_thws is None:
            raise ValueError("pixel_values need grid_thws, int [items, 3] of (t, h, w) in patches")
        pixels = pixel_values.to(self.device, self.dtype)
        return list(encode_images(self.vision_tower, self.mm_projector, pixels, grid_thws))

    def embed_prompt(
        self,
        input_ids_T: Tensor,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [T', D] of one sequence, with each placeholder expanded to its item."""
        embeds_TD = self.language_model.model.embed(input_ids_T)
        if pixel_values is None:
            return embeds_TD
        features = self.encode_images(pixel_values, grid_thws)
        return expand_placeholders(input_ids_T, embeds_TD, features, self._placeholder)[0]

    def _embed_packed(self, input_ids_T: Tensor, batch: SequenceBatch) -> Tensor:
        """Embeddings [T, D] of packed ids, the batch's pictures at their placeholders."""
        embeds_TD = self.language_model.model.embed(input_ids_T)
        if batch.images is None:
            return embeds_TD
        features = self.encode_images(*batch.images)
        return fill_placeholders(input_ids_T, embeds_TD, features, self._placeholder)

    @property
    def _placeholder(self) -> int:
        placeholder = self.config.media_placeholder_token_id
        assert placeholder is not None, "the configuration demands it next to a vision tower"
        return placeholder

    def _merged(
        self, input_ids: Tensor, packing: Packing, pixel_values: Tensor, grid_thws: Tensor | None
    ) -> tuple[Packing, Tensor]:
        merged = merge_batch(
            input_ids,
            self.language_model.model.embed(input_ids),
            self.encode_images(pixel_values, grid_thws),
            self._placeholder,
            attention_mask_BT=packing.mask_BT.to(input_ids.dtype),
        )
        expanded = Packing(merged.attention_mask_BX.to(torch.bool))
        return expanded, expanded.pack(merged.embeds_BXD)

    def _check_routes(self, batch: SequenceBatch) -> None:
        """Raise ValueError for replayed routes of a layer that has no router to replay them."""
        text = self.config.text
        layers = range(text.num_hidden_layers + text.num_nextn_predict_layers)
        if wrong := [i for i in batch.routes if i not in layers or not text.is_moe_layer(i)]:
            routed = [i for i in layers if text.is_moe_layer(i)]
            raise ValueError(f"routes for layers {wrong}; the layers with a router are {routed}")

    def _checked_ids(self, input_ids_T: Tensor | None, batch: SequenceBatch) -> Tensor:
        if input_ids_T is None or input_ids_T.shape != (batch.num_tokens,):
            shape = None if input_ids_T is None else tuple(input_ids_T.shape)
            raise ValueError(f"input_ids {shape} for a batch of {batch.num_tokens} packed tokens")
        return input_ids_T

    def training_loss(
        self,
        input_ids_T: Tensor,
        labels_T: Tensor,
        batch: SequenceBatch,
        *,
        mtp_weight: float = 0.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the labels that count, and its parts (detached).

        `labels[t]` is the token that follows `input_ids[t]`, or `ignore_index`. With
        `mtp_weight` > 0 the first MTP layer's loss on the token after the next is added.
        """
        return training_loss(self, input_ids_T, labels_T, batch, mtp_weight)

    # -- multi-token prediction -----------------------------------------------------------

    def mtp_forward(
        self, next_ids_T: Tensor, mix_TD: Tensor, batch: SequenceBatch, *, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Logits [T, vocabulary] of the MTP layer and the hidden state for its next step [T, D].

        `next_ids` are the tokens after each position, `mix` what `forward_packed` returned as
        `mix_TD` (or the hidden state of the step before). With a cache, the layer writes its own
        rows at the batch's `starts`; the cache's lengths are the backbone's and do not move.
        """
        hidden_TD, normed_TD = self.mtp_hidden(next_ids_T, mix_TD, batch, depth)
        dtype = state_dtype(self.dtype)
        logits = self.ops.linear(normed_TD, self.mtp_head_weight(depth), dtype=dtype)
        return logits, hidden_TD

    def mtp_hidden(
        self, next_ids_T: Tensor, mix_TD: Tensor, batch: SequenceBatch, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The MTP layer's output before and after `shared_head.norm`, both [T, D]."""
        layer = self._mtp_layer(depth)
        table = self.language_model.model if self.config.text.mtp_share_embeddings else layer
        hidden_TD = layer(F.embedding(next_ids_T, table.embed_tokens.weight), mix_TD, batch)
        return hidden_TD, layer.shared_head.norm(hidden_TD)

    def mtp_head_weight(self, depth: int = 0) -> Tensor:
        """Output head [vocabulary, D] of an MTP layer: its own, or the model's when shared."""
        if self.config.text.mtp_share_embeddings:
            return self.language_model.lm_head.weight
        return self._mtp_layer(depth).shared_head.head.weight

    def _mtp_layer(self, depth: int) -> Any:
        decoder, count = self.language_model.model, self.config.text.num_nextn_predict_layers
        if not 0 <= depth < count:
            raise ValueError(f"MTP layer {depth} does not exist; the model has {count} of them")
        return decoder.layers[decoder.num_layers + depth]


def _ops_device(device: torch.device | str) -> str:
    kind = torch.device(device).type
    return "cpu" if kind == "meta" else kind


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
