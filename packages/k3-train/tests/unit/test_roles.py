"""Roles cover every parameter of every model once, with the released names (report 5)."""

import dataclasses

import pytest
import torch

from k3_core.config import K3Config, tensor_manifest
from k3_core.model import K3ForConditionalGeneration
from k3_train.optim.roles import assign_roles

PRESETS = ["k3", "k3-mini", "k3-nano", "k3-test", "k3-test-vision"]


def stacked_shapes(config):
    """Names and shapes of the parameters: expert tensors stacked, packed ones by their width."""
    config = dataclasses.replace(
        config, text=dataclasses.replace(config.text, quantization_config=None)
    )
    shapes = {}
    for spec in tensor_manifest(config):
        head, dot, tail = spec.name.partition(".experts.")
        number, _, leaf = tail.partition(".")
        if dot:
            name = f"{head}.experts.{leaf.removesuffix('.weight')}"
            shapes[name] = (int(number) + 1, *spec.shape)
        else:
            shapes[spec.name] = tuple(spec.shape)
    return shapes


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_has_one_role_and_its_blocks_cover_it(preset):
    config = K3Config.preset(preset)
    shapes = stacked_shapes(config)
    roles = assign_roles(shapes.items(), config.text)
    assert roles.keys() == shapes.keys()
    for name, role in roles.items():
        if role.rule == "muon":
            tensor = torch.empty(shapes[name], device="meta")
            pieces = role.split(tensor)
            assert sum(piece.numel() for piece in pieces) == tensor.numel(), name
            assert all(piece.ndim == 3 for piece in pieces)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_without_memory_has_these_parameters(preset):
    config = K3Config.preset(preset)
    model = K3ForConditionalGeneration(config, device="meta", initialize=False)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    roles = assign_roles(shapes.items(), config.text)
    assert roles == assign_roles(stacked_shapes(config).items(), config.text)
    rules = {role.rule for role in roles.values()}
    assert rules == {"muon", "adamw", "frozen"}


def test_the_vision_tower_has_its_three_projections_apart():
    config = K3Config.preset("k3-nano")
    shapes = stacked_shapes(config)
    name = next(one for one in shapes if one.endswith("wqkv.weight"))
    role = assign_roles(shapes.items(), config.text)[name]
    width = config.vision.qkv_hidden_size
    pieces = role.split(torch.arange(3.0 * width)[:, None])
    assert [piece[:, 0, 0].tolist() for piece in pieces] == [[0, width, 2 * width]]


def test_whole_matrices_are_those_stored_and_experts():
    config = K3Config.preset("k3-test")
    shapes = stacked_shapes(config)
    for name, role in assign_roles(shapes.items(), config.text).items():
        whole = role.whole_matrix()
        assert (whole.rule, whole.is_decayed) == (role.rule, role.is_decayed)
        if role.rule == "muon":
            blocks = whole.split(torch.empty(shapes[name], device="meta"))
            expected = shapes[name] if len(shapes[name]) == 3 else (1, *shapes[name])
            assert [tuple(block.shape) for block in blocks] == [expected], name


EXPECTED = {
    "layers.0.self_attn.q_proj.weight": ("kda_qkv", "muon", True, [(2, 32, 64)]),
    "layers.0.self_attn.v_proj.weight": ("kda_qkv", "muon", True, [(2, 32, 64)]),
    "layers.0.self_attn.o_proj.weight": ("matrix", "muon", True, [(1, 64, 64)]),
    "layers.0.self_attn.g_proj.weight": ("matrix", "muon", True, [(1, 64, 64)]),
    "layers.0.self_attn.b_proj.weight": ("matrix", "muon", True, [(1, 2, 64)]),
    "layers.1.self_attn.q_b_proj.weight": ("mla_q", "muon", True, [(2, 48, 32)]),
    "layers.1.self_attn.q_a_proj.weight": ("matrix", "muon", True, [(1, 32, 64)]),
    "layers.1.self_attn.kv_b_proj.weight": ("mla_kv", "muon", True, [(2, 32, 32)] * 2),
    "layers.1.block_sparse_moe.experts.w1": ("expert", "muon", True, [(8, 32, 32)]),
    "layers.1.block_sparse_moe.gate.weight": ("router", "adamw", True, None),
    "layers.1.block_sparse_moe.gate.e_score_correction_bias": (
        "balance_bias",
        "frozen",
        False,
        None,
    ),
    "layers.0.self_attn.q_conv1d.weight": ("conv", "adamw", True, None),
    "layers.0.self_attn.A_log": ("vector", "adamw", False, None),
    "layers.0.self_attn.dt_bias": ("vector", "adamw", False, None),
    "layers.0.self_attn.o_norm.weight": ("vector", "adamw", False, None),
    "layers.0.input_layernorm.weight": ("vector", "adamw", False, None),
    "layers.1.mlp_res_proj.weight": ("pseudo_query", "adamw", False, None),
    "output_attn_res_proj.weight": ("pseudo_query", "adamw", False, None),
    "embed_tokens.weight": ("embedding", "adamw", True, None),
}


@pytest.mark.parametrize("suffix", EXPECTED)
def test_roles_of_k3_test(suffix):
    config = K3Config.preset("k3-test")
    shapes = stacked_shapes(config)
    (name,) = [one for one in shapes if one.endswith("model." + suffix)]
    role = assign_roles(shapes.items(), config.text)[name]
    blocks = None
    if role.rule == "muon":
        blocks = [tuple(one.shape) for one in role.split(torch.empty(shapes[name], device="meta"))]
    assert (role.name, role.rule, role.is_decayed, blocks) == EXPECTED[suffix]


def test_released_block_shapes_of_the_report():
    config = K3Config.preset("k3")
    shapes = stacked_shapes(config)
    roles = assign_roles(shapes.items(), config.text)

    def blocks(suffix):
        name = next(one for one in shapes if one.endswith(suffix))
        return [tuple(b.shape) for b in roles[name].split(torch.empty(shapes[name], device="meta"))]

    assert blocks("layers.0.self_attn.k_proj.weight") == [(96, 128, 7168)]
    assert blocks("layers.3.self_attn.q_b_proj.weight") == [(96, 192, 1536)]
    assert blocks("layers.3.self_attn.kv_b_proj.weight") == [(96, 128, 512), (96, 128, 512)]
    assert blocks("layers.1.block_sparse_moe.experts.w2") == [(896, 3584, 3072)]


def test_kv_split_separates_the_interleaved_rows_of_a_head():
    config = K3Config.preset("k3-test")
    name = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    role = assign_roles([(name, (128, 32))], config.text)[name]
    rows = torch.arange(128.0)[:, None].expand(128, 32)
    keys, values = role.split(rows.contiguous())
    assert keys[:, :, 0].tolist() == [list(range(0, 32)), list(range(64, 96))]
    assert values[:, :, 0].tolist() == [list(range(32, 64)), list(range(96, 128))]


def test_an_unknown_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no optimizer role for model\.odd\.weight of shape"):
        assign_roles([("model.odd.weight", (2, 3, 4))], K3Config.preset("k3-test").text)
