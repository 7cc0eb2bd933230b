"""Presets stay inside the limits that the design sets for them."""

import json
from dataclasses import replace

import pytest

from k3_core.config import K3Config, count_parameters, tensor_manifest
from k3_core.errors import K3Error

NAMES = ["k3", "k3-mini", "k3-nano", "k3-test", "k3-test-vision"]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_survives_its_own_json(name):
    config = K3Config.preset(name)
    data = json.loads(json.dumps(config.to_dict()))
    again = K3Config.from_dict(data)
    length = config.text.a_log_length
    assert replace(again, text=replace(again.text, a_log_length=length)) == config
    assert again.to_dict() == data


def test_k3_has_the_released_values(golden):
    file = golden("released_checkpoint") / "config_values.json"
    released = K3Config.from_dict(json.loads(file.read_text()))
    preset = K3Config.preset("k3")
    assert preset.text.a_log_length == 128
    assert replace(preset.text, a_log_length=None) == released.text
    assert preset.vision == replace(released.vision, extra={})
    assert replace(preset, text=released.text, vision=released.vision) == released


def test_k3_mini_limits():
    config = K3Config.preset("k3-mini")
    counts, text = count_parameters(config), config.text
    assert text.vocab_size == 163840 and 0.95e9 <= counts.total <= 1.05e9
    assert 140e6 <= counts.active <= 150e6 and counts.active_without_head >= 60e6
    assert text.num_experts_per_token >= 8 and text.hidden_act == "situ"
    assert text.attn_res_block_size and text.attn_res_type == "block" and text.is_latent_moe
    linear = text.linear_attn_config
    assert len(linear.kda_layers) == 3 * len(linear.full_attn_layers)
    assert text.expert_hidden_size % 32 == text.moe_intermediate_size % 32 == 0


def test_k3_nano_shape_and_size():
    config = K3Config.preset("k3-nano")
    text, linear = config.text, config.text.linear_attn_config
    assert (text.vocab_size, text.hidden_size, text.num_hidden_layers) == (4096, 192, 8)
    assert (linear.num_heads, linear.head_dim, linear.full_attn_layers) == (4, 32, (4, 8))
    assert (text.q_lora_rank, text.kv_lora_rank) == (96, 64)
    assert (text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim) == (32, 16, 32)
    assert (text.num_experts, text.num_experts_per_token) == (32, 4)
    assert (text.expert_hidden_size, text.moe_intermediate_size) == (96, 64)
    assert (text.shared_intermediate_size, text.intermediate_size) == (128, 512)
    assert text.num_nextn_predict_layers == 1 and text.mtp_share_embeddings
    ids = (config.bos_token_id, config.eos_token_id, config.media_placeholder_token_id)
    assert ids == (3840, 3842, 3861) and config.pad_token_id == 4095
    header = sum(len(spec.name) + 80 for spec in tensor_manifest(config))
    assert count_parameters(config).num_bytes + header < 11.6e6


def test_k3_test_is_small():
    assert count_parameters(K3Config.preset("k3-test")).total < 1e6


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(K3Error, match=r"'k4'.*k3, k3-mini, k3-nano, k3-test, k3-test-vision"):
        K3Config.preset("k4")
