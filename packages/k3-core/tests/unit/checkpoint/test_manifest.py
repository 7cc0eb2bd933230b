"""The model's state dict has exactly the tensors of the manifest, for every switch."""

from dataclasses import replace

import pytest

from k3_core import K3Config
from k3_core import K3ForConditionalGeneration as Model
from k3_core.config import tensor_manifest

SWITCHES = [
    {},
    {"attn_res_block_size": None},
    {"attn_res_type": "full"},
    {"routed_expert_hidden_size": None},
    {"latent_moe_use_norm": False},
    {"first_k_dense_replace": 3},
    {"first_k_dense_replace": 0, "moe_layer_freq": 2},
    {"num_nextn_predict_layers": 2},
    {"num_nextn_predict_layers": 1, "mtp_share_embeddings": True},
]


def _assert_equal(config):
    model = Model(config, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = replace(config, text=replace(config.text, a_log_length=None, quantization_config=None))
    assert shapes == {spec.name: spec.shape for spec in tensor_manifest(plain)}


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_switches(switch):
    config = K3Config.preset("k3-test")
    _assert_equal(replace(config, text=replace(config.text, **switch)))


def test_low_rank_output_gate():
    config = K3Config.preset("k3-test")
    linear = replace(config.text.linear_attn_config, use_full_rank_gate=False)
    _assert_equal(replace(config, text=replace(config.text, linear_attn_config=linear)))


@pytest.mark.parametrize("name", ["k3-nano", "k3-mini"])
def test_presets(name):
    _assert_equal(K3Config.preset(name))


def test_nano_saved_with_packed_experts_stays_below_its_limit(tmp_path):
    model = Model(K3Config.preset("k3-nano"))
    model.pack_experts()
    model.save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 11.6e6
    again = Model.from_pretrained(tmp_path)
    assert all(bank.is_packed for bank in again.expert_banks())
    assert again.config == model.config
