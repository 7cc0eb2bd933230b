"""route_topk at the released size, with ties and with values that are not finite."""

import pytest
import torch

from k3_core.ops.route_topk.reference import route_topk as reference
from k3_core.testing import relative_error
from k3_kernels.route_topk.op import route_topk

NAMED = {"renormalize": True, "scaling_factor": 2.5}


def _randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("top_k", [16, 17])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_released_size(top_k, activation, device):
    logits, bias = _randn(3, 896, device=device), 0.1 * _randn(896, device=device)
    named = {**NAMED, "top_k": top_k, "activation": activation}
    got = route_topk(logits, bias, **named)
    expected = reference(logits.double(), bias.double(), **named)
    assert torch.equal(got.idx_Tk, expected.idx_Tk)
    for name in ("weight_Tk", "scores_TE", "cutoff_T"):
        assert relative_error(getattr(got, name), getattr(expected, name)) < 2e-6, name


@pytest.mark.parametrize("num_experts", [1, 5, 33, 100])
def test_any_number_of_experts(num_experts, device):
    logits, bias = _randn(6, num_experts, device=device), torch.zeros(num_experts).to(device)
    named = {**NAMED, "top_k": min(5, num_experts)}
    got, expected = (f(x, bias, **named) for f, x in ((route_topk, logits), (reference, logits)))
    assert torch.equal(got.idx_Tk, expected.idx_Tk)
    assert relative_error(got.weight_Tk, expected.weight_Tk) < 1e-6
    assert torch.equal(got.cutoff_T.isinf(), expected.cutoff_T.isinf())


def test_equal_scores_go_to_the_lowest_ids(device):
    logits = torch.zeros(3, 896).to(device)
    logits[1, 800:820] = 1.0
    logits[2, ::100] = -0.0
    got = route_topk(logits, torch.zeros(896).to(device), top_k=16, **NAMED)
    assert got.idx_Tk[0].tolist() == list(range(16))
    assert got.idx_Tk[1].tolist() == list(range(800, 816))
    assert got.idx_Tk[2].tolist() == list(range(16)), "-0 equals 0"
    assert got.cutoff_T.tolist() == pytest.approx([0.5, 1 / (1 + 2.718281828**-1), 0.5])


def test_values_that_are_not_finite(device):
    # An index out of a max that compares with NaN (tokenspeed pull 605).
    logits = _randn(5, 96, device=device)
    logits[1] = float("nan")
    logits[2, :90] = float("nan")
    logits[3, 7], logits[3, 9] = float("inf"), -float("inf")
    got = route_topk(logits, torch.zeros(96).to(device), top_k=16, **NAMED)
    for row in got.idx_Tk.tolist():
        assert len(set(row)) == 16 and min(row) >= 0 and max(row) < 96
    assert got.idx_Tk[1].tolist() == list(range(16))
    assert sorted(got.idx_Tk[2, :6].tolist()) == list(range(90, 96))
    assert got.idx_Tk[3, 0] == 7
    assert got.weight_Tk[[0, 3, 4]].isfinite().all()
    assert got.cutoff_T[[1, 2]].tolist() == [-float("inf")] * 2


def test_bias_moves_the_choice_but_not_the_weights(device):
    logits, bias = _randn(4, 64, device=device), torch.zeros(64).to(device)
    bias[40] = 100.0
    got = route_topk(logits, bias, top_k=4, **NAMED)
    assert (got.idx_Tk[:, 0] == 40).all()
    chosen = logits.sigmoid().gather(1, got.idx_Tk)
    expected = 2.5 * chosen / chosen.sum(1, keepdim=True)
    assert relative_error(got.weight_Tk, expected) < 1e-6


def test_errors_are_those_of_the_reference(device):
    logits, bias = _randn(2, 8, device=device), torch.zeros(8).to(device)
    with pytest.raises(ValueError, match="top_k 9"):
        route_topk(logits, bias, top_k=9, **NAMED)
    with pytest.raises(ValueError, match="'relu' is unknown"):
        route_topk(logits, bias, top_k=2, activation="relu", **NAMED)
