"""Named configurations (design 9): k3, k3-mini, k3-nano, k3-test, k3-test-vision."""

from __future__ import annotations

from typing import Any

from .model import K3Config
from .quantization import released_quantization
from .text import LinearAttnConfig, TextConfig
from .vision import VisionConfig

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 255}
_MEDIA_PAD = 21


def load_preset(name: str) -> K3Config:
    """Build the preset that the registry finds under `name`."""
    from k3_core.plugins import resolve

    return resolve("preset", name).load()()  # type: ignore[no-any-return, operator]


def hybrid_pattern(
    num_layers: int, period: int = 4, *, last_is_mla: bool = False
) -> dict[str, Any]:
    """1-based layer lists with Gated MLA at every `period`-th layer (and at the last one)."""
    layers = range(1, num_layers + 1)
    is_mla = [one % period == 0 or (last_is_mla and one == num_layers) for one in layers]
    return {
        "kda_layers": tuple(one for one, mla in zip(layers, is_mla, strict=True) if not mla),
        "full_attn_layers": tuple(one for one, mla in zip(layers, is_mla, strict=True) if mla),
    }


def _kda(num_layers: int, num_heads: int, head_dim: int, **pattern: Any) -> LinearAttnConfig:
    return LinearAttnConfig(
        **hybrid_pattern(num_layers, **pattern),
        num_heads=num_heads,
        head_dim=head_dim,
        short_conv_kernel_size=4,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
    )


def _text(num_base_tokens: int, **values: Any) -> TextConfig:
    """A text model with the released switches; the 256 special slots follow the base tokens."""
    ids = {name: num_base_tokens + offset for name, offset in _SPECIAL.items()}
    fixed: dict[str, Any] = {
        "vocab_size": num_base_tokens + 256,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "num_shared_experts": 2,
        "dtype": "bfloat16",
        **ids,
    }
    return TextConfig(**{**fixed, **values})


def _model(text: TextConfig, vision: VisionConfig | None) -> K3Config:
    base = text.vocab_size - 256
    ids: dict[str, Any] = {name: base + offset for name, offset in _SPECIAL.items()}
    return K3Config(text=text, vision=vision, media_placeholder_token_id=base + _MEDIA_PAD, **ids)


def k3() -> K3Config:
    """The released 2.78T model. Build it on the meta device only."""
    text = _text(
        163584,
        hidden_size=7168,
        intermediate_size=33792,
        num_hidden_layers=93,
        num_attention_heads=96,
        num_key_value_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=_kda(93, 96, 128, last_is_mla=True),
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        attn_res_block_size=12,
        quantization_config=released_quantization(),
        a_log_length=128,
    )
    vision = VisionConfig(
        vt_hidden_size=1024,
        vt_num_hidden_layers=27,
        vt_num_attention_heads=12,
        vt_intermediate_size=4096,
        qkv_hidden_size=1536,
        mm_hidden_size=1024,
        text_hidden_size=7168,
    )
    return _model(text, vision)


def k3_mini() -> K3Config:
    """About 1B parameters, 0.15B active: the size at which speed is measured. Text only."""
    text = _text(
        163584,
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=_kda(12, 8, 128),
        num_experts=480,
        num_experts_per_token=8,
        moe_intermediate_size=192,
        routed_expert_hidden_size=256,
        attn_res_block_size=4,
    )
    return _model(text, None)


def k3_nano() -> K3Config:
    """The bundled model: 8 layers, MTP, a small vision tower, MXFP4 experts, under 12 MB."""
    text = _text(
        3840,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_attn_config=_kda(8, 4, 32),
        num_experts=32,
        num_experts_per_token=4,
        moe_intermediate_size=64,
        routed_expert_hidden_size=96,
        attn_res_block_size=4,
        num_nextn_predict_layers=1,
        mtp_share_embeddings=True,
        quantization_config=released_quantization(),
    )
    vision = VisionConfig(
        vt_hidden_size=64,
        vt_num_hidden_layers=3,
        vt_num_attention_heads=2,
        vt_intermediate_size=128,
        qkv_hidden_size=64,
        mm_hidden_size=64,
        text_hidden_size=192,
        init_pos_emb_height=16,
        init_pos_emb_width=16,
    )
    return _model(text, vision)


def k3_test() -> K3Config:
    """A KDA layer with the dense MLP and a Gated MLA layer with experts: for tests, first runs."""
    return _model(_test_text(), None)


def k3_test_vision() -> K3Config:
    """k3-test on a small vision tower: for first runs with pictures."""
    text = _test_text()
    vision = VisionConfig(
        vt_hidden_size=64,
        vt_num_hidden_layers=2,
        vt_num_attention_heads=2,
        vt_intermediate_size=128,
        qkv_hidden_size=64,
        mm_hidden_size=64,
        text_hidden_size=text.hidden_size,
        init_pos_emb_height=4,
        init_pos_emb_width=4,
    )
    return _model(text, vision)


def _test_text() -> TextConfig:
    return _text(
        256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_attn_config=_kda(2, 2, 32, period=2),
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        attn_res_block_size=1,
    )
