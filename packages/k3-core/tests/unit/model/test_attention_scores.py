"""What QK-Clip needs of Gated MLA: the heads' largest scores, and weights that scale them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3_core.attention.mla import GatedMLA
from k3_core.config import K3Config
from k3_core.model import SequenceBatch
from k3_core.ops import OpSet

TOKENS = 9


@pytest.fixture(params=["reference", "cpu"])
def attention(request) -> GatedMLA:
    overrides = {"kernel.mla_prefill": f"mla_prefill.{request.param}"}
    ops = OpSet.resolve("cpu", "float64", overrides)
    made = GatedMLA(K3Config.preset("k3-test").text, 3, ops, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.4, generator=generator)
    made.seen = []
    made.observer = made.seen.append
    return made.train()


def inputs(attention):
    generator = torch.Generator().manual_seed(1)
    width = attention.q_a_proj.weight.shape[1]
    x_TD = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
    return x_TD, SequenceBatch.from_lengths((4, TOKENS - 4))


def scores(attention, x_TD):
    """Scaled scores [H, T, T] of the parts of each head and of the shared key, unmasked."""
    heads, nope = attention.num_heads, attention.nope_dim
    q_THD = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x_TD)))
    q_THD = q_THD.unflatten(-1, (heads, -1))
    latent_TX = attention._normed(attention.kv_a_proj_with_mqa(x_TD))
    k_THD, _ = attention.expand(latent_TX)
    own = torch.einsum("thd,shd->hts", q_THD[..., :nope], k_THD[..., :nope])
    shared = torch.einsum("thd,shd->hts", q_THD[..., nope:], k_THD[..., nope:])
    return own * attention.scale, shared * attention.scale


def test_the_observer_gets_the_largest_score_of_each_head(attention):
    x_TD, batch = inputs(attention)
    attention(x_TD, batch)
    own, shared = scores(attention, x_TD)
    sequence = torch.tensor([0] * 4 + [1] * (TOKENS - 4))
    is_seen = (sequence[:, None] == sequence) & torch.ones(TOKENS, TOKENS).tril().bool()
    expected_H = (own + shared).masked_fill(~is_seen, float("-inf")).amax((1, 2))
    assert len(attention.seen) == 1
    torch.testing.assert_close(attention.seen[0], expected_H.detach())


def test_scaling_multiplies_each_part_of_the_scores_of_a_head_alone(attention):
    x_TD, batch = inputs(attention)
    before = scores(attention, x_TD)
    shared_weight = attention.kv_a_proj_with_mqa.weight.clone()
    values = attention.expand(attention._normed(attention.kv_a_proj_with_mqa(x_TD)))[1]
    attention(x_TD, batch)
    factor_H = torch.tensor([0.3, 1.0], dtype=torch.float64)
    attention.scale_scores(factor_H)
    for was, now in zip(before, scores(attention, x_TD), strict=True):
        torch.testing.assert_close(now, was * factor_H[:, None, None])
        assert torch.equal(now[1], was[1])
    assert torch.equal(attention.kv_a_proj_with_mqa.weight, shared_weight)
    latent_TX = attention._normed(attention.kv_a_proj_with_mqa(x_TD))
    assert torch.equal(attention.expand(latent_TX)[1], values)
    attention(x_TD, batch)
    torch.testing.assert_close(attention.seen[1], attention.seen[0] * factor_H)


def test_evaluation_is_not_observed_and_outputs_do_not_change(attention):
    x_TD, batch = inputs(attention)
    observed = attention(x_TD, batch)
    silent = attention.eval()(x_TD, batch)
    assert len(attention.seen) == 1
    assert torch.equal(observed, silent)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_reports_the_same_maxima_and_gradients(attention, use_reentrant):
    x_TD, batch = inputs(attention)

    def gradient(run):
        leaf = x_TD.clone().requires_grad_()
        run(leaf).square().sum().backward()
        return leaf.grad

    plain = gradient(lambda x: attention(x, batch))
    again = gradient(lambda x: checkpoint(attention, x, batch, use_reentrant=use_reentrant))
    torch.testing.assert_close(again, plain)
    assert len(attention.seen) == 3
    for seen_H in attention.seen[1:]:
        torch.testing.assert_close(seen_H, attention.seen[0])


@pytest.mark.parametrize("attention", ["cpu"], indirect=True)
def test_a_graph_reports_the_maxima(attention):
    torch._dynamo.reset()
    x_TD, batch = inputs(attention)
    largest_H = torch.full((attention.num_heads,), -torch.inf, dtype=torch.float64)
    attention.observer = lambda seen_H: torch.fmax(largest_H, seen_H, out=largest_H)
    expected = attention(x_TD, batch)
    want_H = largest_H.clone()
    largest_H.fill_(-torch.inf)
    got = torch.compile(attention, fullgraph=True, backend="aot_eager")(x_TD, batch)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(largest_H, want_H)
