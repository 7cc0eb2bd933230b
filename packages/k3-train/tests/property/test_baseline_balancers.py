"""The sign rule, the auxiliary loss and none: rules, invariances, loads (report 4.2, training 5).

T tokens, E experts, k routes a token.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.reference import route_topk
from k3_train.balance.auxiliary import AuxiliaryBalancer, switch_loss
from k3_train.balance.load import summarise
from k3_train.balance.none import NoBalancer
from k3_train.balance.quantile_exact import ExactQuantileBalancer
from k3_train.balance.quantile_histogram import HistogramQuantileBalancer
from k3_train.balance.sign import SignBalancer
from k3_train.config import BalanceSection

RATE = 0.01
SETTINGS = BalanceSection(sign_rate=RATE)

cases = st.tuples(
    st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 9), st.integers(1, 8)
).map(lambda case: (*case[:3], min(case[3], case[2] - 1)))


def route(logits_TE, bias_E, top_k):
    return route_topk(logits_TE, bias_E, top_k=top_k, renormalize=True, scaling_factor=1.0)


def logits(seed, num_tokens, num_experts, skew=1.0):
    generator = torch.Generator().manual_seed(seed)
    mean_E = skew * torch.randn(num_experts, generator=generator)
    return torch.randn(num_tokens, num_experts, generator=generator) + mean_E


def start_bias(seed, num_experts):
    bias_E = 0.3 * torch.randn(num_experts, generator=torch.Generator().manual_seed(seed + 1))
    return bias_E - bias_E.mean()


def updated(balancer_class, parts, bias_E, top_k):
    """The biases after one update that saw `parts`, pairs of routes and a mask."""
    bias_E = bias_E.clone()
    balancer = balancer_class([bias_E], top_k=top_k, settings=SETTINGS)
    for routes, mask_T in parts:
        balancer.observe(0, routes, mask_T)
    balancer.update()
    return bias_E


@given(cases)
def test_the_sign_rule_is_its_formula_and_centred(case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), 0.7 + start_bias(seed, num_experts)
    routes = route(logits_TE, bias_E, top_k)
    got_E = updated(SignBalancer, [(routes, None)], bias_E, top_k)
    load_E = np.bincount(routes.idx_Tk.flatten().numpy(), minlength=num_experts)
    want_E = bias_E.double().numpy() + RATE * np.sign(load_E.sum() - load_E * num_experts)
    np.testing.assert_allclose(got_E.numpy(), want_E - want_E.mean(), atol=1e-6)
    assert abs(float(got_E.double().mean())) < 1e-7


@given(cases, st.lists(st.integers(1, 20), max_size=6), st.randoms())
def test_order_and_split_do_not_matter_to_the_sign_rule(case, sizes, random):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    routes = route(logits_TE, bias_E, top_k)
    order = torch.tensor(random.sample(range(num_tokens), num_tokens))
    cuts = sorted({min(cut, num_tokens) for cut in itertools.accumulate(sizes)} | {num_tokens})
    parts = [
        (Routes(*(field[order[begin:end]] for field in routes)), None)
        for begin, end in itertools.pairwise([0, *cuts])
    ]
    whole = updated(SignBalancer, [(routes, None)], bias_E, top_k)
    assert torch.equal(updated(SignBalancer, parts, bias_E, top_k), whole)


@pytest.mark.parametrize("balancer_class", [SignBalancer, AuxiliaryBalancer, NoBalancer])
def test_no_tokens_leave_the_biases_alone(balancer_class):
    bias_E = 0.5 + start_bias(0, 4)
    empty = route(torch.zeros(0, 4), bias_E, 2)
    assert torch.equal(updated(balancer_class, [(empty, None)], bias_E, 2), bias_E)
    assert torch.equal(updated(balancer_class, [], bias_E, 2), bias_E)


def test_tokens_that_do_not_count_change_nothing_of_the_sign_rule():
    bias_E = start_bias(0, 6)
    routes = route(logits(0, 32, 6), bias_E, 2)
    mask_T = torch.arange(32) % 4 > 0
    counted = Routes(*(field[mask_T] for field in routes))
    want_E = updated(SignBalancer, [(counted, None)], bias_E, 2)
    assert torch.equal(updated(SignBalancer, [(routes, mask_T)], bias_E, 2), want_E)


def test_the_sign_rule_survives_a_round_trip_between_micro_batches():
    bias_E = start_bias(3, 6)
    first_routes, second_routes = (route(logits(seed, 40, 6), bias_E, 2) for seed in (1, 2))
    want_E = updated(SignBalancer, [(first_routes, None), (second_routes, None)], bias_E, 2)
    first = SignBalancer([bias_E.clone()], top_k=2, settings=SETTINGS)
    first.observe(0, first_routes)
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    got_E = bias_E.clone()
    second = SignBalancer([got_E], top_k=2, settings=SETTINGS)
    second.load_state_tensors(saved)
    second.observe(0, second_routes)
    second.update()
    assert torch.equal(got_E, want_E)
    assert not any(tensor.any() for tensor in second.state_tensors().values())


@given(cases, st.booleans())
def test_the_switch_loss_is_its_formula(case, has_mask):
    seed, num_tokens, num_experts, top_k = case
    routes = route(logits(seed, num_tokens, num_experts), torch.zeros(num_experts), top_k)
    mask_T = torch.arange(num_tokens) % 3 != 1 if has_mask else torch.ones(num_tokens).bool()
    got = switch_loss(routes, mask_T if has_mask else None)
    scores_TE = routes.scores_TE[mask_T].double().numpy()
    idx_Tk = routes.idx_Tk[mask_T].numpy()
    f_E = np.bincount(idx_Tk.flatten(), minlength=num_experts) / idx_Tk.size
    p_E = (scores_TE / scores_TE.sum(1, keepdims=True)).mean(0)
    assert float(got) == pytest.approx(num_experts * float(f_E @ p_E), rel=1e-5)


def test_perfect_balance_has_a_switch_loss_of_one():
    scores_TE = torch.full((6, 3), 0.5)
    idx_Tk = torch.arange(6)[:, None] % 3
    routes = Routes(idx_Tk, torch.ones(6, 1), scores_TE, torch.zeros(6))
    assert float(switch_loss(routes)) == pytest.approx(1.0)


def test_the_gradient_is_that_of_loss_plus_weight_times_share_times_switch_loss():
    def gradient(with_loss):
        leaf_TE = logits(0, 20, 6).double().requires_grad_()
        routes = route(leaf_TE, torch.zeros(6).double(), 2)
        loss = with_loss(routes)
        loss.backward()
        return leaf_TE.grad

    def main(routes):
        return (routes.weight_Tk * torch.arange(1.0, 3.0)).sum()

    balancer = AuxiliaryBalancer(
        [torch.zeros(6)], top_k=2, settings=BalanceSection(auxiliary_weight=0.3)
    )
    balancer.share.fill_(0.25)
    got = gradient(lambda routes: main(balancer.auxiliary(routes, None)))
    want = gradient(lambda routes: main(routes) + 0.3 * 0.25 * switch_loss(routes))
    torch.testing.assert_close(got, want)
    assert (got - gradient(main)).abs().max() > 1e-4


def loads_over_steps(balancer_class, num_steps, settings=SETTINGS, lr=0.0):
    """Summaries of the load of one skewed batch, before each update; logits follow a loss."""
    logits_TE = logits(0, 2048, 32, 2.0).requires_grad_()
    bias_E = torch.zeros(32)
    balancer = balancer_class([bias_E], top_k=4, settings=settings)
    seen = []
    for _ in range(num_steps):
        routes = route(logits_TE, bias_E, 4)
        counts_E = torch.bincount(routes.idx_Tk.flatten(), minlength=32)
        seen.append(summarise(counts_E[None].double()))
        if hasattr(balancer, "auxiliary"):
            balancer.auxiliary(routes, None).weight_Tk.sum().backward()
            with torch.no_grad():
                logits_TE -= lr * logits_TE.grad
            logits_TE.grad = None
        balancer.observe(0, routes)
        balancer.update()
    return seen


@pytest.mark.parametrize("balancer_class", [ExactQuantileBalancer, HistogramQuantileBalancer])
def test_quantiles_balance_a_skewed_router_and_revive_its_experts(balancer_class):
    seen = loads_over_steps(balancer_class, 6)
    assert seen[0].max_over_mean > 5
    assert (seen[0].num_dead, seen[1].num_dead) == (9, 0)
    assert seen[5].max_over_mean < 1.1


def test_the_sign_rule_is_slower_and_takes_its_rate():
    slow = loads_over_steps(SignBalancer, 13, BalanceSection(sign_rate=1e-3))
    fast = loads_over_steps(SignBalancer, 13, BalanceSection(sign_rate=1e-2))
    assert fast[12].max_over_mean < 0.9 * fast[0].max_over_mean
    assert fast[12].num_dead < fast[0].num_dead
    assert 0.9 * slow[0].max_over_mean < slow[12].max_over_mean < slow[0].max_over_mean
    assert fast[12].max_over_mean > 1.5


def test_the_auxiliary_loss_moves_the_scores_towards_balance():
    seen = loads_over_steps(AuxiliaryBalancer, 20, BalanceSection(auxiliary_weight=1.0), lr=2e4)
    assert seen[19].max_over_mean < 0.7 * seen[0].max_over_mean
    assert seen[19].num_dead < seen[0].num_dead


def test_none_leaves_the_loads_as_they_are():
    seen = loads_over_steps(NoBalancer, 3)
    assert seen[0] == seen[2]
    assert seen[0].num_dead > 0
