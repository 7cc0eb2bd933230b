"""What a probe sees equals what the model computes (report 1.1, 3.1)."""

import dataclasses
import json
import math

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_train.data.sampler import Batch
from k3_train.report.probe import probe

IDS = torch.tensor([3, 14, 15, 92, 65, 35, 89])


def model_of(path, **text):
    config = K3Config.from_dict(json.loads(path.read_text()))
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, **text))
    return K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))


def batch_of(ids, *lengths):
    return Batch(ids, ids, lengths or (len(ids),))


@pytest.mark.parametrize("kind", ["full", "block"])
def test_depth_weights_of_one_token_make_the_mixes_of_the_model(tiny_config, kind):
    model = model_of(tiny_config, attn_res_type=kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("res_proj.weight"):
                param.copy_(torch.randn(param.shape, generator=generator))
    seen = probe(model, batch_of(IDS[:1]))
    packed = SequenceBatch.from_lengths([1])
    with torch.no_grad():
        states = model.eval().forward_packed(IDS[:1], packed, output_hidden_states=True)
    states = states.hidden_states
    embeds, attn, mlp = (
        states[key] for key in ("inputs_embeds", "layers.0.attn_out", "layers.0.mlp_out")
    )
    # With blocks of one layer, the second layer's attention reads the embedding and the first sum.
    sources = [embeds, attn, mlp] if kind == "full" else [embeds, attn + mlp]
    mixed = sum(weight * x for weight, x in zip(seen.depth["1.attn"], sources, strict=True))
    torch.testing.assert_close(mixed, states["layers.1.attn_mix"])
    assert all(weights.sum() == pytest.approx(1) for weights in seen.depth.values())
    assert "output" in seen.depth


def test_a_plain_residual_has_no_depth_weights(tiny_config):
    assert not probe(model_of(tiny_config, attn_res_block_size=None), batch_of(IDS)).depth


def test_memory_follows_from_the_decay_and_states_are_those_of_a_cache(tiny_config):
    model = model_of(tiny_config)
    layer = model.language_model.model.layers[0].self_attn
    with torch.no_grad():
        layer.f_b_proj.weight.zero_()
        layer.A_log.zero_()
        layer.dt_bias.fill_(-2.0)
    seen = probe(model, batch_of(IDS, 3, 4))
    tokens = (1 + math.exp(2.0)) / 5
    torch.testing.assert_close(seen.memory[0], torch.full((2, 5), tokens, dtype=torch.float64))
    cache = model.new_cache(2)
    with torch.no_grad():
        model.forward_packed(IDS, SequenceBatch.from_lengths([3, 4], cache=cache))
    norms_NH = torch.linalg.matrix_norm(cache.kda_state(0))
    torch.testing.assert_close(seen.state_norm[0], norms_NH.mean(0))


def test_a_probe_leaves_the_model_as_it_was(tiny_config):
    model = model_of(tiny_config).train()
    holders = [m for m in (*model.modules(), model.language_model.model.mixer) if hasattr(m, "ops")]
    before = [holder.ops for holder in holders]
    first = probe(model, batch_of(IDS))
    assert model.training
    assert all(holder.ops is ops for holder, ops in zip(holders, before, strict=True))
    second = probe(model, batch_of(IDS))
    torch.testing.assert_close(first.out_rms, second.out_rms)
