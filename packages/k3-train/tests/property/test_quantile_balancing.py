"""Quantile Balancing against enumeration in numpy (report 4.2, training 3.1 a-k).

T tokens, E experts, k routes a token, q = T k / E. The oracle routes and sorts with numpy only.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.reference import route_topk
from k3_train.balance.none import NoBalancer
from k3_train.balance.quantile_exact import ExactQuantileBalancer
from k3_train.balance.quantile_histogram import HistogramQuantileBalancer, quantile_position
from k3_train.config import BalanceSection

BALANCERS = [ExactQuantileBalancer, HistogramQuantileBalancer]
DEFAULT = BalanceSection()
NUM_BINS = DEFAULT.num_bins


def route(logits_TE, bias_E, top_k):
    return route_topk(logits_TE, bias_E, top_k=top_k, renormalize=True, scaling_factor=1.0)


def logits(seed, num_tokens, num_experts, skew=1.0):
    generator = torch.Generator().manual_seed(seed)
    mean_E = skew * torch.randn(num_experts, generator=generator)
    return torch.randn(num_tokens, num_experts, generator=generator) + mean_E


def start_bias(seed, num_experts):
    bias_E = 0.3 * torch.randn(num_experts, generator=torch.Generator().manual_seed(seed + 1))
    return bias_E - bias_E.mean()


def updated(balancer_class, routes, bias_E, top_k, num_bins=NUM_BINS, ema=0.0):
    bias_E = bias_E.clone()
    balancer = balancer_class(
        [bias_E], top_k=top_k, settings=BalanceSection(num_bins=num_bins, ema=ema)
    )
    balancer.observe(0, routes)
    balancer.update()
    return bias_E


def oracle_required(logits_TE, bias_E, top_k):
    """r_ij in float64: the (k+1)-th best biased score of the token minus the raw score."""
    scores = 1 / (1 + np.exp(-logits_TE.double().numpy()))
    biased = np.sort(scores + bias_E.double().numpy(), axis=1)[:, ::-1]
    return biased[:, top_k, None] - scores, scores


cases = st.tuples(
    st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 9), st.integers(1, 8)
).map(lambda case: (*case[:3], min(case[3], case[2] - 1)))


@given(cases)
def test_exact_bias_is_the_sorted_required_bias(case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    new_E = updated(ExactQuantileBalancer, route(logits_TE, bias_E, top_k), bias_E, top_k)
    required_TE, _ = oracle_required(logits_TE, bias_E, top_k)
    want_E = np.sort(required_TE, axis=0)[num_tokens * top_k // num_experts]
    np.testing.assert_allclose(new_E.numpy(), want_E - want_E.mean(), atol=2e-6)


@given(cases, st.sampled_from([10, 300, NUM_BINS]))
def test_histogram_is_within_one_bin_of_the_ranked_required_bias(case, num_bins):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    balancer = HistogramQuantileBalancer(
        [bias_E], top_k=top_k, settings=BalanceSection(num_bins=num_bins)
    )
    balancer.observe(0, route(logits_TE, bias_E, top_k))
    target = num_tokens * top_k / num_experts
    low, high = float(bias_E.min()) - 1, float(bias_E.max()) + 1
    width = (high - low) / num_bins
    got_E = low + quantile_position(balancer.counts_LEB[0], target).numpy() * width
    required_TE, _ = oracle_required(logits_TE, bias_E, top_k)
    want_E = np.sort(required_TE, axis=0)[math.ceil(target) - 1]
    assert np.abs(got_E - want_E).max() <= width + 1e-5


@given(cases)
def test_required_biases_lie_in_the_range(case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts, 4.0), start_bias(seed, num_experts)
    required_TE, _ = oracle_required(logits_TE, bias_E, top_k)
    assert required_TE.min() > float(bias_E.min()) - 1
    assert required_TE.max() < float(bias_E.max()) + 1
    balancer = HistogramQuantileBalancer([bias_E], top_k=top_k, settings=DEFAULT)
    balancer.observe(0, route(logits_TE, bias_E, top_k))
    assert (balancer.counts_LEB[0].sum(-1) == num_tokens).all()


@given(cases, st.lists(st.integers(1, 20), max_size=6), st.randoms())
@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_order_and_split_of_the_tokens_do_not_matter_bitwise(balancer_class, case, sizes, random):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    routes = route(logits_TE, bias_E, top_k)
    whole = updated(balancer_class, routes, bias_E, top_k)
    order = torch.tensor(random.sample(range(num_tokens), num_tokens))
    cuts = sorted({min(cut, num_tokens) for cut in itertools.accumulate(sizes)} | {num_tokens})
    parts_E = bias_E.clone()
    balancer = balancer_class([parts_E], top_k=top_k, settings=DEFAULT)
    for begin, end in itertools.pairwise([0, *cuts]):
        balancer.observe(0, Routes(*(field[order[begin:end]] for field in routes)))
    balancer.update()
    assert torch.equal(whole, parts_E)


@given(cases, st.integers(0, 60))
def test_histograms_of_shards_add_up_to_that_of_all_tokens_bitwise(case, cut):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    routes = route(logits_TE, bias_E, top_k)
    counts = []
    for part in (slice(None), slice(cut), slice(cut, None)):
        balancer = HistogramQuantileBalancer([bias_E], top_k=top_k, settings=DEFAULT)
        balancer.observe(0, Routes(*(field[part] for field in routes)))
        counts.append(balancer.counts_LEB)
    assert torch.equal(counts[0], counts[1] + counts[2])


@given(cases, st.floats(0.1, 0.99))
@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_a_moving_mean_keeps_its_share_of_the_old_biases(balancer_class, case, ema):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    routes = route(logits_TE, bias_E, top_k)
    plain_E = updated(balancer_class, routes, bias_E, top_k)
    got_E = updated(balancer_class, routes, bias_E, top_k, ema=ema)
    torch.testing.assert_close(got_E, ema * bias_E + (1 - ema) * plain_E, atol=1e-6, rtol=0)


@given(cases, st.randoms())
@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_experts_can_be_renamed(balancer_class, case, random):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    order = random.sample(range(num_experts), num_experts)
    plain = updated(balancer_class, route(logits_TE, bias_E, top_k), bias_E, top_k)
    renamed = updated(
        balancer_class, route(logits_TE[:, order], bias_E[order], top_k), bias_E[order], top_k
    )
    torch.testing.assert_close(renamed, plain[order], atol=1e-6, rtol=0)


@given(cases)
@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_new_biases_have_mean_zero(balancer_class, case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts) + 0.7
    new_E = updated(balancer_class, route(logits_TE, bias_E, top_k), bias_E, top_k)
    assert abs(float(new_E.double().mean())) < 1e-7


@given(cases, st.integers(-8, 8))
def test_a_constant_added_to_the_biases_changes_no_route(case, eighths):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    base = route(logits_TE.double(), bias_E.double(), top_k)
    moved = route(logits_TE.double(), bias_E.double() + eighths / 8, top_k)
    assert torch.equal(base.idx_Tk.sort().values, moved.idx_Tk.sort().values)


@given(cases)
def test_weights_and_their_gradient_do_not_depend_on_the_biases(case):
    seed, num_tokens, num_experts, top_k = case
    results = []
    for bias_E in (torch.zeros(num_experts), 1e-9 * torch.arange(num_experts)):
        logits_TE = logits(seed, num_tokens, num_experts).double().requires_grad_()
        routes = route(logits_TE, bias_E.double(), top_k)
        order = routes.idx_Tk.argsort()
        (routes.weight_Tk.gather(1, order) * torch.arange(1.0, top_k + 1)).sum().backward()
        results.append((routes.weight_Tk.gather(1, order).detach(), logits_TE.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(cases)
def test_exact_bias_splits_the_tokens_at_the_quota(case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    balancer = ExactQuantileBalancer([bias_E], top_k=top_k, settings=DEFAULT)
    balancer.observe(0, route(logits_TE, bias_E, top_k))
    required_TE = balancer.state_tensors()["required.0"].numpy()
    quantile_E = np.sort(required_TE, axis=0)[num_tokens * top_k // num_experts]
    balancer.update()
    np.testing.assert_allclose(
        bias_E.numpy() - bias_E.numpy()[0], quantile_E - quantile_E[0], atol=2e-7
    )
    quota = num_tokens * top_k / num_experts
    assert ((required_TE < quantile_E).sum(0) <= quota).all()
    assert (quota <= (required_TE <= quantile_E).sum(0)).all()
    is_alone_E = (required_TE == quantile_E).sum(0) == 1
    assert ((required_TE < quantile_E).sum(0) == math.floor(quota))[is_alone_E].all()


def dual(scores_TE, alpha_T, bias_E, quota, top_k):
    """Dual of balanced assignment: an upper bound of its score for any prices (report Eq. 23)."""
    margin = scores_TE - alpha_T[:, None] + bias_E
    return np.maximum(margin, 0).sum() + top_k * alpha_T.sum() - quota * bias_E.sum()


@given(st.integers(0, 10_000), st.integers(1, 2))
def test_the_dual_never_rises_and_bounds_every_balanced_assignment(seed, top_k):
    num_tokens, num_experts = 4, 4
    quota = num_tokens * top_k // num_experts
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    scores_TE = oracle_required(logits_TE, bias_E, top_k)[1]
    choices = list(itertools.combinations(range(num_experts), top_k))
    best = max(
        sum(scores_TE[token, list(chosen)].sum() for token, chosen in enumerate(plan))
        for plan in itertools.product(choices, repeat=num_tokens)
        if (np.bincount(np.concatenate(plan), minlength=num_experts) == quota).all()
    )
    alpha_T, last = np.zeros(num_tokens), math.inf
    for _ in range(4):
        routes = route(logits_TE.double(), bias_E.double(), top_k)
        alpha_T = routes.cutoff_T.numpy()
        after_alpha = dual(scores_TE, alpha_T, bias_E.double().numpy(), quota, top_k)
        required_TE = alpha_T[:, None] - scores_TE
        # Centring moves all biases; moving the cutoffs with them leaves the dual as it is.
        centre = np.sort(required_TE, axis=0)[quota].mean()
        bias_E = updated(ExactQuantileBalancer, routes, bias_E, top_k)
        after_bias = dual(scores_TE, alpha_T - centre, bias_E.double().numpy(), quota, top_k)
        assert best - 1e-6 <= after_bias <= after_alpha + 1e-6
        assert after_alpha <= last + 1e-6
        last = after_bias


@pytest.mark.parametrize("balancer_class", BALANCERS)
@pytest.mark.parametrize(
    ("logits_TE", "top_k"),
    [
        (torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), 3),
        (torch.zeros(16, 8), 2),
        (torch.ones(1, 8), 2),
        (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).round(), 2),
    ],
    ids=["all but one expert", "all equal", "one token", "ties"],
)
def test_degenerate_batches_give_finite_biases(balancer_class, logits_TE, top_k):
    bias_E = torch.zeros(logits_TE.shape[1])
    new_E = updated(balancer_class, route(logits_TE, bias_E, top_k), bias_E, top_k)
    assert torch.isfinite(new_E).all()
    assert new_E.abs().max() <= 2


@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_no_tokens_leave_the_biases_alone(balancer_class):
    bias_E = start_bias(0, 4)
    empty = updated(balancer_class, route(torch.zeros(0, 4), bias_E, 2), bias_E, 2)
    assert torch.equal(empty, bias_E)


@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_state_survives_a_round_trip_between_micro_batches(balancer_class):
    logits_TE, bias_E = logits(3, 64, 6), start_bias(3, 6)
    want_E = updated(balancer_class, route(logits_TE, bias_E, 2), bias_E, 2)
    first = balancer_class([bias_E.clone()], top_k=2, settings=DEFAULT)
    first.observe(0, route(logits_TE[:40], bias_E, 2))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    got_E = bias_E.clone()
    second = balancer_class([got_E], top_k=2, settings=DEFAULT)
    second.load_state_tensors(saved)
    second.observe(0, route(logits_TE[40:], bias_E, 2))
    second.update()
    assert torch.equal(got_E, want_E)


@pytest.mark.parametrize("balancer_class", BALANCERS)
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_router_without_a_cutoff_is_refused(balancer_class, top_k):
    with pytest.raises(ValueError, match="1 <= top_k < experts"):
        balancer_class([torch.zeros(4)], top_k=top_k, settings=DEFAULT)


def test_none_moves_nothing():
    bias_E = start_bias(0, 6)
    routes = route(logits(0, 32, 6), bias_E, 2)
    assert torch.equal(updated(NoBalancer, routes, bias_E, 2), bias_E)


@given(cases)
@pytest.mark.parametrize("balancer_class", BALANCERS)
def test_tokens_that_do_not_count_change_nothing(balancer_class, case):
    seed, num_tokens, num_experts, top_k = case
    logits_TE, bias_E = logits(seed, num_tokens, num_experts), start_bias(seed, num_experts)
    want_E = updated(balancer_class, route(logits_TE, bias_E, top_k), bias_E, top_k)
    padded_TE = torch.cat([logits(seed + 1, 3, num_experts, 5.0), logits_TE])
    mask_T = torch.arange(num_tokens + 3) >= 3
    got_E = bias_E.clone()
    balancer = balancer_class([got_E], top_k=top_k, settings=DEFAULT)
    balancer.observe(0, route(padded_TE, bias_E, top_k), mask_T)
    balancer.update()
    # A sigmoid of the same number may differ in the last bit where it lies in another lane.
    torch.testing.assert_close(got_E, want_E, rtol=0, atol=1e-6)
