"""Every switch of the released configuration class changes the model as it says."""

import dataclasses

import pytest
import torch

from k3_core.config import K3Config, tensor_manifest
from k3_core.model import K3ForConditionalGeneration, SequenceBatch

SWITCHES = {
    "silu": {"hidden_act": "silu"},
    "softplus gate": {"linear_attn_config": {"gate_lower_bound": None}},
    "low-rank gate": {"linear_attn_config": {"use_full_rank_gate": False}},
    "plain residual": {"attn_res_block_size": None},
    "full attention residual": {"attn_res_type": "full"},
    "full-width experts": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "expert groups": {"num_expert_group": 4, "topk_group": 2},
    "two dense layers": {"first_k_dense_replace": 2},
    "every second layer routed": {"moe_layer_freq": 2},
    "no renormalisation": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "uncapped up branch": {"activation_situ_linear_beta": None},
    "MTP": {"num_nextn_predict_layers": 1},
    "MTP with shared embeddings": {"num_nextn_predict_layers": 1, "mtp_share_embeddings": True},
    "two MTP layers": {"num_nextn_predict_layers": 2},
}


def switched(config: K3Config, changes: dict) -> K3Config:
    changes = dict(changes)
    if linear := changes.pop("linear_attn_config", None):
        changes["linear_attn_config"] = dataclasses.replace(
            config.text.linear_attn_config, **linear
        )
    text = dataclasses.replace(config.text, **changes)
    return dataclasses.replace(config, text=text)


def build(config: K3Config) -> K3ForConditionalGeneration:
    return K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("name", SWITCHES)
def test_the_state_dict_is_the_manifest(golden, name):
    config = switched(K3Config.from_file(golden("text_tiny")), SWITCHES[name])
    model = K3ForConditionalGeneration(config, device="meta")
    actual = {
        key.removeprefix("language_model."): tuple(value.shape)
        for key, value in model.state_dict().items()
    }
    assert actual == {spec.name: spec.shape for spec in tensor_manifest(config)}


@pytest.mark.parametrize("name", SWITCHES)
def test_whole_equals_cached(golden, name):
    """In float64: one pass, and a prefill, a chunk and single steps over a cache."""
    model = build(switched(K3Config.from_file(golden("text_tiny")), SWITCHES[name]))
    model.bind_ops("cpu", "float64")
    ids = torch.randint(0, 256, (1, 23), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        pieces = (ids[:, :13], ids[:, 13:20], *ids[:, 20:].split(1, dim=1))
        cached = torch.cat([model(input_ids=piece, cache=cache).logits for piece in pieces], dim=1)
    torch.testing.assert_close(cached, whole, atol=1e-9, rtol=1e-9)
    assert whole.std() > 0.01


@pytest.mark.parametrize("name", [n for n in SWITCHES if "MTP" not in n])
def test_the_switch_matters(golden, name):
    """The same seed with and without the switch gives other logits (sharing no code path)."""
    config = K3Config.from_file(golden("text_tiny"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        base, changed = (
            build(c)(input_ids=ids).logits for c in (config, switched(config, SWITCHES[name]))
        )
    assert (base - changed).abs().max() > 1e-6


def test_packed_documents_are_separate(golden):
    """A change in the first document does not reach the second one."""
    model = build(K3Config.from_file(golden("text_tiny")))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 256, (30,), generator=generator)
    other = ids.clone()
    other[:11] = torch.randint(0, 256, (11,), generator=generator)
    batch = SequenceBatch.from_lengths([11, 0, 19])
    with torch.no_grad():
        first, second = (model.forward_packed(x, batch).logits for x in (ids, other))
        alone = model.forward_packed(ids[11:], SequenceBatch.from_lengths([19])).logits
    # Not bit-identical: experts then multiply other numbers of rows at a time.
    torch.testing.assert_close(first[11:], second[11:], atol=1e-12, rtol=1e-12)
    assert (first[:11] - second[:11]).abs().max() > 1e-3
    torch.testing.assert_close(first[11:], alone, atol=1e-9, rtol=1e-9)
