"""Every parameter is filled by its law, also when the allocator hands out poisoned memory."""

import math

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration
from k3_core.model.init import init_law


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty returns NaN everywhere, so an unwritten parameter shows."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize("name", ["text_tiny", "mm_tiny"])
def test_every_parameter_follows_its_law(poisoned, golden, name):
    config = K3Config.from_file(golden(name))
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(1))
    seen = set()
    for key, value in model.state_dict().items():
        law = init_law(key)
        seen.add(law)
        check_law(key, law, value.double(), config.text.initializer_range)
    assert seen == {"normal", "ones", "zeros", "dt_bias", "conv"}


def check_law(key, law, value, std):
    if law == "zeros":
        assert (value == 0).all(), key
    elif law == "ones":
        assert (value == 1).all(), key
    elif law == "conv":
        bound = value.shape[-1] ** -0.5
        assert value.abs().max() <= bound and value.abs().max() > 0.8 * bound, key
        assert abs(value.mean()) < 0.1 * bound, key
    elif law == "dt_bias":
        dt = torch.nn.functional.softplus(value)
        assert dt.min() >= 0.99e-3 and dt.max() <= 1.01e-1, key
        middle = (math.log(1e-3) + math.log(1e-1)) / 2
        assert abs(dt.log().mean() - middle) < 0.5, key
    else:
        sigmas = value.numel() ** -0.5
        assert abs(value.mean()) < 6 * std * sigmas, key
        assert abs(value.std() / std - 1) < 6 * sigmas + 0.01, key


def test_the_laws_name_the_right_parameters():
    """The laws of the report, spelled out for one name of each kind."""
    prefix = "language_model.model.layers.1."
    expected = {
        "self_attn.A_log": "zeros",
        "self_attn.dt_bias": "dt_bias",
        "self_attn.q_conv1d.weight": "conv",
        "self_attn.o_norm.weight": "ones",
        "self_attn.kv_a_layernorm.weight": "ones",
        "self_attention_res_proj.weight": "zeros",
        "self_attention_res_norm.weight": "ones",
        "block_sparse_moe.gate.e_score_correction_bias": "zeros",
        "block_sparse_moe.gate.weight": "normal",
        "block_sparse_moe.routed_expert_norm.weight": "ones",
        "block_sparse_moe.experts.w1": "normal",
        "shared_head.norm.weight": "ones",
        "eh_proj.weight": "normal",
        "enorm.weight": "ones",
    }
    assert {key: init_law(prefix + key) for key in expected} == expected


def test_a_seed_means_one_model(golden):
    config = K3Config.from_file(golden("text_tiny"))
    models = [
        K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    ]
    first, same, other = (model.language_model.lm_head.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_float32_set_stays_float32(golden):
    config = K3Config.from_file(golden("text_tiny"))
    model = K3ForConditionalGeneration(config, dtype=torch.bfloat16)
    kept = {key for key, value in model.state_dict().items() if value.dtype == torch.float32}
    suffixes = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
    assert kept == {key for key in model.state_dict() if key.endswith(suffixes)}
    assert len(kept) == 6 * 6 + 8
