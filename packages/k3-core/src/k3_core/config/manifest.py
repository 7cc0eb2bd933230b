"""Every tensor of a checkpoint in the released layout (architecture 2.1), without torch.

Legend: names are the released ones, shapes [out, in], dtypes the codes of safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .model import K3Config
from .text import MXFP4_BLOCK, TextConfig
from .vision import VisionConfig

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F64": 8}
FLOAT32_SUFFIXES = (
    ".A_log",
    ".dt_bias",
    ".o_norm.weight",
    "_conv1d.weight",
    ".e_score_correction_bias",
)
Entry = tuple[str, tuple[int, ...]]


class TensorSpec(NamedTuple):
    """One stored tensor. `dtype` is a safetensors code: BF16, F16, F32 or U8."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Weights held: two per packed byte, none in a scale."""
        if self.name.endswith(".weight_scale"):
            return 0
        return math.prod(self.shape) * (2 if self.name.endswith(".weight_packed") else 1)


def is_float32_kept(name: str) -> bool:
    """Whether the release stores this tensor in float32 whatever the model's dtype."""
    return name.endswith(FLOAT32_SUFFIXES)


def text_prefix(config: K3Config) -> str:
    """What precedes `model.` and `lm_head.` in tensor names."""
    return "" if config.is_flat else "language_model."


def tensor_manifest(config: K3Config) -> Iterator[TensorSpec]:
    """Yield a TensorSpec for every tensor of a checkpoint of `config`.

    Routed experts are packed when the configuration is quantised. MTP layers follow the decoder
    layers under the indices num_hidden_layers and up.
    """
    code = DTYPE_CODES[config.dtype]
    prefix = text_prefix(config)
    for name, shape in _text_entries(config.text):
        yield TensorSpec(prefix + name, shape, "F32" if is_float32_kept(name) else code)
        if name.endswith(".gate.e_score_correction_bias"):
            moe = prefix + name.removesuffix("gate.e_score_correction_bias")
            yield from _experts(config.text, moe, None if config.is_quantized else code)
    if config.vision is not None:
        for name, shape in _vision_entries(config.vision):
            yield TensorSpec(name, shape, code)


def _text_entries(text: TextConfig) -> Iterator[Entry]:
    table = (text.vocab_size, text.hidden_size)
    yield "model.embed_tokens.weight", table
    for index in range(text.num_hidden_layers):
        yield from _layer(text, index)
    for index in range(text.num_nextn_predict_layers):
        yield from _mtp_layer(text, text.num_hidden_layers + index)
    if text.attn_res_block_size is not None:
        yield from _depth_mix("model.output_attn_res", text.hidden_size)
    yield "model.norm.weight", (text.hidden_size,)
    yield "lm_head.weight", table


def _layer(text: TextConfig, index: int) -> Iterator[Entry]:
    base = f"model.layers.{index}."
    if text.attn_res_block_size is not None:
        yield from _depth_mix(f"{base}self_attention_res", text.hidden_size)
        yield from _depth_mix(f"{base}mlp_res", text.hidden_size)
    yield from _decoder_block(text, index)


def _decoder_block(text: TextConfig, index: int) -> Iterator[Entry]:
    base, width = f"model.layers.{index}.", text.hidden_size
    yield f"{base}input_layernorm.weight", (width,)
    attention = _kda if text.is_kda_layer(index) else _mla
    yield from attention(text, f"{base}self_attn.")
    yield f"{base}post_attention_layernorm.weight", (width,)
    if text.is_moe_layer(index):
        yield from _moe(text, f"{base}block_sparse_moe.")
    else:
        yield from _mlp(f"{base}mlp.", width, text.intermediate_size)


def _mtp_layer(text: TextConfig, index: int) -> Iterator[Entry]:
    base, width = f"model.layers.{index}.", text.hidden_size
    yield f"{base}enorm.weight", (width,)
    yield f"{base}hnorm.weight", (width,)
    yield f"{base}eh_proj.weight", (width, 2 * width)
    yield from _decoder_block(text, index)
    yield f"{base}shared_head.norm.weight", (width,)
    if not text.mtp_share_embeddings:
        yield f"{base}shared_head.head.weight", (text.vocab_size, width)
        yield f"{base}embed_tokens.weight", (text.vocab_size, width)


def _depth_mix(base: str, width: int) -> Iterator[Entry]:
    yield f"{base}_norm.weight", (width,)
    yield f"{base}_proj.weight", (1, width)


def _kda(text: TextConfig, base: str) -> Iterator[Entry]:
    kda, width = text.linear_attn_config, text.hidden_size
    inner = kda.num_heads * kda.head_dim
    for name in ("q", "k", "v"):
        yield f"{base}{name}_proj.weight", (inner, width)
        yield f"{base}{name}_conv1d.weight", (inner, 1, kda.short_conv_kernel_size)
    yield f"{base}f_a_proj.weight", (kda.head_dim, width)
    yield f"{base}f_b_proj.weight", (inner, kda.head_dim)
    yield f"{base}b_proj.weight", (kda.num_heads, width)
    yield f"{base}A_log", (text.a_log_length or kda.num_heads,)
    yield f"{base}dt_bias", (inner,)
    if kda.use_full_rank_gate:
        yield f"{base}g_proj.weight", (inner, width)
    else:
        yield f"{base}g_a_proj.weight", (kda.head_dim, width)
        yield f"{base}g_b_proj.weight", (inner, kda.head_dim)
    yield f"{base}o_norm.weight", (kda.head_dim,)
    yield f"{base}o_proj.weight", (width, inner)


def _mla(text: TextConfig, base: str) -> Iterator[Entry]:
    heads, width = text.num_attention_heads, text.hidden_size
    q_rank, kv_rank = text.q_lora_rank, text.kv_lora_rank
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    yield f"{base}q_a_proj.weight", (q_rank, width)
    yield f"{base}q_a_layernorm.weight", (q_rank,)
    yield f"{base}q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield f"{base}kv_a_proj_with_mqa.weight", (kv_rank + rope, width)
    yield f"{base}kv_a_layernorm.weight", (kv_rank,)
    yield f"{base}kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield f"{base}g_proj.weight", (heads * value, width)
    yield f"{base}o_proj.weight", (width, heads * value)


def _mlp(base: str, width: int, inner: int) -> Iterator[Entry]:
    yield f"{base}gate_proj.weight", (inner, width)
    yield f"{base}up_proj.weight", (inner, width)
    yield f"{base}down_proj.weight", (width, inner)


def _moe(text: TextConfig, base: str) -> Iterator[Entry]:
    width, latent = text.hidden_size, text.expert_hidden_size
    yield from _mlp(f"{base}shared_experts.", width, text.shared_intermediate_size)
    if text.is_latent_moe:
        yield f"{base}routed_expert_down_proj.weight", (latent, width)
        if text.latent_moe_use_norm:
            yield f"{base}routed_expert_norm.weight", (latent,)
        yield f"{base}routed_expert_up_proj.weight", (width, latent)
    yield f"{base}gate.weight", (text.num_experts, width)
    yield f"{base}gate.e_score_correction_bias", (text.num_experts,)


def _experts(text: TextConfig, moe: str, code: str | None) -> Iterator[TensorSpec]:
    """Routed experts of one layer; `code` None means MXFP4."""
    inner, latent = text.moe_intermediate_size, text.expert_hidden_size
    shapes = {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}
    for expert in range(text.num_experts):
        for matrix, (rows, columns) in shapes.items():
            name = f"{moe}experts.{expert}.{matrix}.weight"
            if code is not None:
                yield TensorSpec(name, (rows, columns), code)
                continue
            yield TensorSpec(f"{name}_packed", (rows, columns // 2), "U8")
            yield TensorSpec(f"{name}_scale", (rows, columns // MXFP4_BLOCK), "U8")


def _vision_entries(vision: VisionConfig) -> Iterator[Entry]:
    width, inner = vision.vt_hidden_size, vision.qkv_hidden_size
    tower, patch = "vision_tower.", vision.patch_size
    grid = (vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    yield f"{tower}patch_embed.proj.weight", (width, 3, patch, patch)
    yield f"{tower}patch_embed.pos_emb.weight", grid
    for index in range(vision.vt_num_hidden_layers):
        block = f"{tower}encoder.blocks.{index}."
        yield f"{block}norm0.weight", (width,)
        yield f"{block}norm1.weight", (width,)
        yield f"{block}wqkv.weight", (3 * inner, width)
        yield f"{block}wo.weight", (width, inner)
        yield f"{block}mlp.fc0.weight", (vision.vt_intermediate_size, width)
        yield f"{block}mlp.fc1.weight", (width, vision.vt_intermediate_size)
    yield f"{tower}encoder.final_layernorm.weight", (width,)
    merged = vision.merged_size
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, merged)
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,)
