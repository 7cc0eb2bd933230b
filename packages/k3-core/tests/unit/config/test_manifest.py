"""The manifest against the published tensor list and the headers of the golden files."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from safetensors import safe_open

from k3_core.config import K3Config, count_parameters, tensor_manifest

NUMBERS = (("layers", "layer"), ("experts", "expert"), ("blocks", "block"))


def _pattern(name):
    for word, label in NUMBERS:
        name = re.sub(rf"{word}\.\d+", f"{word}.{{{label}}}", name)
    return name


@pytest.fixture(scope="module")
def k3_manifest():
    return list(tensor_manifest(K3Config.preset("k3")))


def test_k3_equals_the_published_tensor_list(golden, k3_manifest):
    published = json.loads((golden("released_checkpoint") / "tensors.json").read_text())
    expected = Counter()
    for row in published["tensors"]:
        key = (row["name"].partition(" (")[0], tuple(row["shape"]), row["dtype"])
        expected[key] += row["count"]
    assert Counter((_pattern(s.name), s.shape, s.dtype) for s in k3_manifest) == expected
    assert len(k3_manifest) == len({s.name for s in k3_manifest}) == published["tensor_count"]
    assert sum(s.num_bytes for s in k3_manifest) == published["total_size_bytes"]


def test_k3_counts_equal_the_report(k3_manifest):
    counts = count_parameters(K3Config.preset("k3"), k3_manifest)
    assert (round(counts.total / 1e9, 2), round(counts.active / 1e9, 2)) == (2779.93, 104.19)
    assert round(counts.vision_tower / 1e6, 1) == 401.2
    assert round(counts.projector / 1e6, 2) == 46.14
    assert round(counts.text / 1e9, 2) == 2779.48
    assert round((counts.active + 163840 * 7168) / 1e9, 2) == 105.36


@pytest.mark.parametrize("name", ["text_tiny", "mm_tiny", "mxfp4_tiny"])
def test_manifest_equals_the_headers_of_golden_files(golden, name):
    config = K3Config.from_file(golden(name))
    with safe_open(golden(name) / "model.safetensors", "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored = {k: (tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
    length = next(shape for key, (shape, _) in stored.items() if key.endswith("A_log"))[0]
    config = replace(config, text=replace(config.text, a_log_length=length))
    assert {s.name: (s.shape, s.dtype) for s in tensor_manifest(config)} == stored


def _names(config, **changes):
    changed = replace(config, text=replace(config.text, **changes))
    return {spec.name for spec in tensor_manifest(changed)}


def test_switches_add_and_remove_their_tensors():
    config = K3Config.preset("k3-test")
    every = _names(config)
    gone = every - _names(config, attn_res_block_size=None)
    assert len(gone) == 2 * 4 + 2 and all("res_" in name for name in gone)
    gone = every - _names(config, routed_expert_hidden_size=None)
    assert {name.rpartition(".routed")[2] for name in gone} == {
        "_expert_down_proj.weight",
        "_expert_norm.weight",
        "_expert_up_proj.weight",
    }
    assert len(every - _names(config, latent_moe_use_norm=False)) == 1
    low_rank = replace(config.text.linear_attn_config, use_full_rank_gate=False)
    assert len(_names(config, linear_attn_config=low_rank) - every) == 2


def test_full_width_experts_have_the_model_width():
    config = K3Config.preset("k3-test")
    config = replace(config, text=replace(config.text, routed_expert_hidden_size=None))
    shapes = {s.name.rpartition("experts.0.")[2]: s.shape for s in tensor_manifest(config)}
    assert shapes["w1.weight"] == (32, 64) and shapes["w2.weight"] == (64, 32)


def test_mtp_layers_follow_the_decoder_and_zero_creates_none():
    config = K3Config.preset("k3-test")
    none = _names(config, num_nextn_predict_layers=0)
    own = _names(config, num_nextn_predict_layers=1) - none
    shared = _names(config, num_nextn_predict_layers=1, mtp_share_embeddings=True) - none
    base = "language_model.model.layers.2."
    assert all(name.startswith(base) for name in own) and none == _names(config)
    assert own - shared == {base + "shared_head.head.weight", base + "embed_tokens.weight"}
    assert {base + one for one in ("enorm.weight", "hnorm.weight", "eh_proj.weight")} <= shared
    assert not [name for name in own if "res_" in name or ".A_log" in name]


def test_moe_layer_frequency():
    config = K3Config.preset("k3-nano")
    text = replace(config.text, first_k_dense_replace=0, moe_layer_freq=2)
    assert [text.is_moe_layer(index) for index in range(5)] == [True, False, True, False, True]
