"""route_topk against enumeration in plain Python, and its public failures."""

import itertools
import math

import pytest
import torch

from k3_core.ops.route_topk.reference import route_topk

DEFAULTS = {"top_k": 2, "renormalize": True, "scaling_factor": 1.0}


def enumerate_best(biased, k, allowed):
    """The k-subset of `allowed` with the largest sum, by trying all of them."""
    return set(max(itertools.combinations(allowed, k), key=lambda c: sum(biased[i] for i in c)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1)])
def test_choice_weights_and_cutoff(seed, groups, kept):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(8, generator=generator, dtype=torch.float64)
    routes = route_topk(
        logits, bias, top_k=3, renormalize=True, scaling_factor=1.5,
        num_groups=groups, topk_groups=kept,
    )  # fmt: skip
    for token in range(7):
        scores = [1 / (1 + math.exp(-float(x))) for x in logits[token]]
        biased = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        size = 8 // groups
        best_two = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        chosen_groups = sorted(range(groups), key=lambda g: -best_two[g])[:kept]
        allowed = [i for i in range(8) if i // size in chosen_groups]
        expected = enumerate_best(biased, 3, allowed)
        assert set(routes.idx_Tk[token].tolist()) == expected
        total = sum(scores[i] for i in expected)
        for expert, weight in zip(routes.idx_Tk[token], routes.weight_Tk[token], strict=True):
            assert float(weight) == pytest.approx(1.5 * scores[int(expert)] / total)
        rest = sorted((biased[i] for i in allowed if i not in expected), reverse=True)
        assert float(routes.cutoff_T[token]) == pytest.approx(rest[0] if rest else -math.inf)


def test_the_bias_changes_no_weight_and_no_gradient():
    """Weights and the router's gradient depend on the chosen set only (report 4)."""
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    plain = route_topk(logits, torch.zeros(6), **DEFAULTS)
    grad = torch.autograd.grad(plain.weight_Tk.square().sum(), logits)[0]
    shifted = route_topk(logits, torch.full((6,), 7.0), **DEFAULTS)
    assert torch.equal(plain.idx_Tk, shifted.idx_Tk)
    assert torch.equal(plain.weight_Tk, shifted.weight_Tk)
    other = torch.autograd.grad(shifted.weight_Tk.square().sum(), logits)[0]
    assert torch.equal(grad, other)


def test_nan_scores_are_never_chosen_before_finite_ones():
    logits = torch.tensor([[float("nan"), 0.1, -0.2, 0.3], [float("inf"), 0.0, 0.0, 0.0]])
    routes = route_topk(logits, torch.zeros(4), **DEFAULTS)
    assert set(routes.idx_Tk[0].tolist()) == {1, 3}
    assert routes.weight_Tk[0].isfinite().all()
    assert 0 in routes.idx_Tk[1].tolist()


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1)])
def test_scores_that_are_all_bad_still_name_distinct_experts(value, groups, kept):
    logits = torch.full((3, 4), value)
    routes = route_topk(logits, torch.zeros(4), **DEFAULTS, num_groups=groups, topk_groups=kept)
    for chosen in routes.idx_Tk.tolist():
        assert len(set(chosen)) == 2 and set(chosen) <= set(range(4))


def test_all_experts_chosen_and_no_tokens():
    everything = route_topk(torch.zeros(2, 3), torch.zeros(3), **{**DEFAULTS, "top_k": 3})
    assert everything.cutoff_T.tolist() == [-math.inf, -math.inf]
    nothing = route_topk(torch.zeros(0, 3), torch.zeros(3), **DEFAULTS)
    assert nothing.idx_Tk.shape == (0, 2)


@pytest.mark.parametrize("changes", [{"top_k": 0}, {"top_k": 7}])
def test_top_k_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=r"1\.\.6"):
        route_topk(torch.zeros(1, 6), torch.zeros(6), **{**DEFAULTS, **changes})


def test_groups_that_cannot_hold_the_choice_are_refused():
    with pytest.raises(ValueError, match="groups"):
        route_topk(torch.zeros(1, 6), torch.zeros(6), **{**DEFAULTS, "top_k": 4}, num_groups=3)


def counted(logits, bias, num_bins, rows):
    """The histogram by plain Python, in float64."""
    counts = torch.zeros(len(bias), num_bins, dtype=torch.int32)
    low, high = min(bias) - 1, max(bias) + 1
    for row in rows:
        scores = [1 / (1 + math.exp(-x)) for x in logits[row].tolist()]
        cutoff = sorted((s + b for s, b in zip(scores, bias, strict=True)), reverse=True)[2]
        for expert, score in enumerate(scores):
            counts[expert, int((cutoff - score - low) / ((high - low) / num_bins))] += 1
    return counts


def test_required_biases_are_added_to_a_histogram():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(6, generator=generator, dtype=torch.float64)
    histogram = torch.zeros(6, 40, dtype=torch.int32)
    mask = torch.tensor([True, False, True] * 3)
    padded = logits.clone()
    padded[~mask] = float("nan")
    route_topk(padded, bias, **DEFAULTS, histogram_EB=histogram, is_counted_T=mask)
    expected = counted(logits, bias.tolist(), 40, [0, 2, 3, 5, 6, 8])
    assert torch.equal(histogram, expected)
    route_topk(logits, bias, **DEFAULTS, histogram_EB=histogram)
    assert torch.equal(histogram, expected + counted(logits, bias.tolist(), 40, range(9)))


def test_values_that_are_not_finite_count_in_the_outer_bins():
    logits = torch.zeros(2, 4)
    logits[0] = float("nan")
    histogram = torch.zeros(4, 8, dtype=torch.int32)
    route_topk(logits, torch.zeros(4), **DEFAULTS, histogram_EB=histogram)
    # Scores without an order are -inf to the choice, so the cutoff is too; the other row has r = 0.
    assert histogram[:, [0, 4]].tolist() == [[1, 1]] * 4


@pytest.mark.parametrize(
    ("histogram", "mask", "message"),
    [
        (torch.zeros(4, 8), None, "must be contiguous, int32"),
        (torch.zeros(3, 8, dtype=torch.int32), None, r"\[4, bins\]"),
        (torch.zeros(8, 4, dtype=torch.int32).T, None, "must be contiguous"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(2), "must be bool"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(3, dtype=torch.bool), r"\[2\], one flag"),
    ],
)
def test_what_cannot_count_is_named(histogram, mask, message):
    with pytest.raises(ValueError, match=message):
        route_topk(
            torch.zeros(2, 4),
            torch.zeros(4),
            **DEFAULTS,
            histogram_EB=histogram,
            is_counted_T=mask,
        )
