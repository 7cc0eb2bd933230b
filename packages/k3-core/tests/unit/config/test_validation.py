"""An invalid value names itself, what is allowed and the next step; listed switches work."""

import json

import pytest

from k3_core.config import ConfigError, K3Config
from k3_core.config.quantization import FORMAT

TEXT_ERRORS = [
    ("mla_use_nope", False, "True"),
    ("mla_use_output_gate", False, "True"),
    ("hidden_act", "gelu", "'situ' or 'silu'"),
    ("moe_router_activation_func", "softmax", "'sigmoid'"),
    ("topk_method", "greedy", "'noaux_tc'"),
    ("tie_word_embeddings", True, "False"),
    ("hidden_size", 0, "at least 1"),
    ("hidden_size", "64", "an integer"),
    ("hidden_size", True, "an integer"),
    ("rms_norm_eps", 0.0, "above 0"),
    ("activation_situ_beta", -1.0, "at least 0"),
    ("num_key_value_heads", 2, "num_attention_heads = 4"),
    ("num_experts_per_token", 13, "1 to 12"),
    ("num_expert_group", 5, "a divisor of num_experts = 12"),
    ("num_expert_group", 12, "2 or more in each group"),
    ("topk_group", 2, "1 to num_expert_group = 1"),
    ("moe_layer_freq", 0, "at least 1"),
    ("attn_res_block_size", 0, "at least 1"),
    ("attn_res_type", "none", "'block' or 'full'"),
    ("dtype", "int8", "'bfloat16' or 'float16' or 'float32'"),
    ("eos_token_id", 256, "0 to vocab_size - 1 = 255"),
    ("q_lora_rank", None, "an integer"),
    ("rms_norm_eps", float("inf"), "a finite number"),
    ("activation_situ_linear_beta", float("nan"), "a finite number"),
    ("routed_scaling_factor", 0.0, "above 0"),
    ("quantization_config", {"format": "nvfp4"}, "'mxfp4-pack-quantized'"),
    ("quantization_config", {"format": FORMAT, "config_groups": []}, "a table"),
    ("quantization_config", {"format": FORMAT, "config_groups": {"g": None}}, "a table"),
    ("quantization_config", {"format": FORMAT, "config_groups": {"g": {"weights": 4}}}, "a table"),
]
LINEAR_ERRORS = [
    ("gate_lower_bound", -5.5, "null or a number in [-5, 0)"),
    ("gate_lower_bound", 0.0, "null or a number in [-5, 0)"),
    ("short_conv_kernel_size", 1, "at least 2"),
    ("use_full_rank_gate", "yes", "true or false"),
]
VISION_ERRORS = [
    ("merge_type", "other", "'sd2_tpool'"),
    ("attn_bias", True, "False"),
    ("linear_bias", True, "False"),
    ("patch_embed_proj_bias", True, "False"),
    ("activation_func", "relu", "'gelu_pytorch_tanh'"),
    ("norm_type", "layernorm", "'rmsnorm'"),
    ("mm_projector_type", "mlp", "'patchmergerv2'"),
    ("merge_kernel_size", [4, 4], "[2, 2]"),
    ("merge_kernel_size", [2], "a list of 2"),
    ("qkv_hidden_size", 50, "3 heads times a multiple of 4"),
    ("mm_hidden_size", 48, "vt_hidden_size = 32"),
    ("text_hidden_size", 32, "hidden_size = 64"),
]
ERRORS = [
    *((("text_config",), *row) for row in TEXT_ERRORS),
    *((("text_config", "linear_attn_config"), *row) for row in LINEAR_ERRORS),
    *((("vision_config",), *row) for row in VISION_ERRORS),
    ((), "media_placeholder_token_id", 999, "0 to vocab_size - 1 = 255"),
    ((), "model_type", "kimi_k2", "'kimi_k3'"),
]


@pytest.fixture
def data(golden):
    return json.loads((golden("mm_tiny") / "config.json").read_text())


def _section(data, path):
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize(("path", "name", "value", "allowed"), ERRORS)
def test_bad_value_is_refused_by_name(data, path, name, value, allowed):
    _section(data, path)[name] = value
    with pytest.raises(ConfigError) as caught:
        K3Config.from_dict(data)
    message = str(caught.value)
    assert ".".join((*path, name)) in message
    assert allowed in message
    assert caught.value.step


@pytest.mark.parametrize("path", [("text_config",), ("text_config", "linear_attn_config")])
def test_the_next_step_names_the_whole_path(data, path):
    """Sections are read by themselves, and `text_config` is called `text` in code."""
    name = ".".join(path)
    _section(data, path[:-1])[path[-1]] = [1]
    with pytest.raises(ConfigError, match=rf"^{name}: .*table of .*\. Change {name}\.$"):
        K3Config.from_dict(data)


def test_missing_field_is_named(data):
    del data["text_config"]["kv_lora_rank"]
    with pytest.raises(ConfigError, match=r"text_config\.kv_lora_rank: is missing.*Add"):
        K3Config.from_dict(data)


@pytest.mark.parametrize(
    ("kda", "mla", "odd"),
    [
        ([1, 2, 3], [4, 6], r"\[5\]"),
        ([1, 2, 3, 5], [4, 6, 7], r"\[7\]"),
        ([1, 2, 3, 4, 5], [4, 6], "4"),
    ],
)
def test_layer_lists_must_cover_the_layers_once(data, kda, mla, odd):
    data["text_config"]["linear_attn_config"].update(kda_layers=kda, full_attn_layers=mla)
    with pytest.raises(ConfigError, match=rf"full_attn_layers.*{odd}"):
        K3Config.from_dict(data)


def test_quantisation_needs_widths_in_blocks(golden):
    data = json.loads((golden("mxfp4_tiny") / "config.json").read_text())
    data["text_config"]["moe_intermediate_size"] = 48
    with pytest.raises(ConfigError, match=r"moe_intermediate_size: 48.*multiple of 32"):
        K3Config.from_dict(data)
    data["text_config"]["moe_intermediate_size"] = 32
    group = data["text_config"]["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["group_size"] = 16
    with pytest.raises(ConfigError, match=r"group_0.weights.group_size: 16.*32"):
        K3Config.from_dict(data)


SWITCHES = [
    {"hidden_act": "silu"},
    {"attn_res_block_size": None},
    {"attn_res_type": "full"},
    {"routed_expert_hidden_size": None},
    {"latent_moe_use_norm": False},
    {"num_expert_group": 4, "topk_group": 2},
    {"use_grouped_topk": False},
    {"first_k_dense_replace": 3},
    {"moe_layer_freq": 2},
    {"num_nextn_predict_layers": 2},
    {"moe_renormalize": False},
    {"activation_situ_beta": 0},
    {"activation_situ_linear_beta": None},
    {"num_key_value_heads": None},
    {"head_dim": 16},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_switches_of_the_released_class_are_accepted(data, switch):
    data["text_config"].update(switch)
    config = K3Config.from_dict(data)
    assert config.to_dict() == data
    assert all(getattr(config.text, name) == value for name, value in switch.items())


@pytest.mark.parametrize("switch", [{"gate_lower_bound": None}, {"use_full_rank_gate": False}])
def test_switches_of_kda_are_accepted(data, switch):
    data["text_config"]["linear_attn_config"].update(switch)
    assert K3Config.from_dict(data).to_dict() == data


def test_fall_back_rules(data):
    text = data["text_config"]
    for key in ("activation_situ_beta", "activation_situ_linear_beta", "num_key_value_heads"):
        del text[key]
    del text["attn_res_block_size"], text["routed_expert_hidden_size"]
    config = K3Config.from_dict(data).text
    assert config.situ_beta == 1.0 and config.situ_linear_beta is None
    assert config.attn_res_block_size is None
    assert not config.is_latent_moe and config.expert_hidden_size == 64
