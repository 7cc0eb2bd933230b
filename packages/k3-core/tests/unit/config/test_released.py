"""The released config.json goes in and comes out unchanged, in both layouts."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3_core.config import ConfigError, K3Config

FILES = [
    "text_tiny/config.json",
    "mm_tiny/config.json",
    "mxfp4_tiny/config.json",
    "released_checkpoint/config_values.json",
]


def _read(golden: Callable[[str], Path], name: str) -> dict:
    folder, file = name.split("/")
    return json.loads((golden(folder) / file).read_text())


@pytest.mark.parametrize("name", FILES)
def test_round_trip_keeps_every_field_and_the_order(golden, name):
    data = _read(golden, name)
    assert json.dumps(K3Config.from_dict(copy.deepcopy(data)).to_dict()) == json.dumps(data)


@pytest.mark.parametrize("name", FILES)
def test_round_trip_with_fewer_keys_adds_none(golden, name):
    data = _read(golden, name)
    text = data.get("text_config", data)
    for key in ("moe_renormalize", "use_cache", "routed_scaling_factor"):
        text.pop(key, None)
    assert K3Config.from_dict(data).to_dict() == data


def test_unknown_fields_are_kept_at_every_level(golden):
    data = _read(golden, "mm_tiny/config.json")
    extra = {"nested": [1, {"a": None}]}
    sections = (
        data,
        data["text_config"],
        data["vision_config"],
        data["text_config"]["linear_attn_config"],
    )
    for section in sections:
        section["transformers_version"] = extra
    config = K3Config.from_dict(data)
    assert config.to_dict() == data
    parts = (config, config.text, config.vision, config.text.linear_attn_config)
    assert all(part.extra["transformers_version"] == extra for part in parts)


def test_a_changed_field_is_written_even_if_it_was_not_given(golden):
    data = _read(golden, "text_tiny/config.json")
    config = K3Config.from_dict(data)
    changed = replace(config, text=replace(config.text, mla_norm_eps=1e-5, use_cache=False))
    assert changed.to_dict() == {**data, "mla_norm_eps": 1e-5, "use_cache": False}


def test_flat_layout_takes_ids_and_dtype_from_the_text_section(golden):
    config = K3Config.from_file(golden("text_tiny"))
    assert config.is_flat and config.vision is None
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (240, 242, 255)
    assert config.dtype == "bfloat16" and config.model_type == "kimi_linear"


def test_released_values_are_read(golden):
    config = K3Config.from_dict(_read(golden, "released_checkpoint/config_values.json"))
    assert not config.is_flat and config.pad_token_id == 163839
    assert config.text.kda_layers_0[:4] == (0, 1, 2, 4)
    assert [i for i in range(93) if not config.text.is_kda_layer(i)][-3:] == [87, 91, 92]
    assert not config.text.is_moe_layer(0) and config.text.is_moe_layer(92)
    assert config.text.situ_beta == 4.0 and config.text.shared_intermediate_size == 6144
    assert config.vision is not None and config.vision.head_dim == 128


def test_missing_file_and_broken_json_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        K3Config.from_file(tmp_path)


def test_result_does_not_share_state_with_its_source(golden):
    data = _read(golden, "mxfp4_tiny/config.json")
    config = K3Config.from_dict(data)
    config.to_dict()["text_config"]["quantization_config"]["format"] = "changed"
    data["text_config"]["quantization_config"]["format"] = "changed"
    assert config.text.quantization_config["format"] == "mxfp4-pack-quantized"
