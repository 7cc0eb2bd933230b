"""route_topk as a loop: ties, values that are not finite, strides, what the reference serves."""

import pytest
import torch

from k3_core.ops.route_topk.reference import route_topk as reference
from k3_core.testing import relative_error
from k3_kernels.route_topk import loops
from k3_kernels.route_topk.loops import route_topk

NAMED = {"renormalize": True, "scaling_factor": 2.5}


def rand(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "reference", None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (32, 4), (33, 16), (896, 16)])
def test_against_the_reference(experts, top_k, renormalize, dtype, tolerance, only_loops):
    logits, bias = rand(6, experts, dtype=dtype), 0.1 * rand(experts, dtype=dtype)
    named = {"top_k": top_k, "renormalize": renormalize, "scaling_factor": 2.5}
    got = route_topk(logits, bias, **named)
    expected = reference(logits.double(), bias.double(), **named)
    assert torch.equal(got.idx_Tk, expected.idx_Tk)
    for name in ("weight_Tk", "scores_TE", "cutoff_T"):
        assert getattr(got, name).dtype == dtype
        assert relative_error(getattr(got, name), getattr(expected, name)) < tolerance, name


def test_equal_scores_go_to_the_lowest_ids(only_loops):
    logits = torch.zeros(4, 96)
    logits[1, 80:90] = 1.0
    logits[2, ::10] = -0.0
    logits[3] = 100.0 + torch.arange(96)
    got = route_topk(logits, torch.zeros(96), top_k=6, **NAMED)
    assert got.idx_Tk.tolist() == [[*range(6)], [*range(80, 86)], [*range(6)], [*range(6)]]
    assert got.cutoff_T.tolist() == pytest.approx([0.5, 1 / (1 + 2.718281828**-1), 0.5, 1.0])


def test_values_that_are_not_finite(only_loops):
    logits, clean = rand(5, 40), rand(5, 40)
    logits[1] = float("nan")
    logits[2, :36] = float("nan")
    logits[3, 7], logits[3, 9] = float("inf"), -float("inf")
    got = route_topk(logits, torch.zeros(40), top_k=6, **NAMED)
    assert got.idx_Tk[1].tolist() == list(range(6))
    assert sorted(got.idx_Tk[2, :4].tolist()) == list(range(36, 40))
    assert got.idx_Tk[2, 4:].tolist() == [0, 1]
    assert got.idx_Tk[3, 0] == 7 and got.scores_TE[3, 7] == 1
    assert got.cutoff_T[[1, 2]].tolist() == [-float("inf")] * 2
    assert torch.equal(got.scores_TE.isnan(), logits.isnan())
    expected = route_topk(clean, torch.zeros(40), top_k=6, **NAMED)
    for own, other in zip(got, expected, strict=True):
        assert torch.equal(own[[0, 4]], other[[0, 4]])


def test_a_row_alone_is_the_same_and_strides_are_free(only_loops):
    logits, bias = rand(9, 64)[:, ::2], 0.1 * rand(64)[::2]
    got = route_topk(logits, bias, top_k=4, **NAMED)
    for t in range(9):
        alone = route_topk(logits[t : t + 1].clone(), bias.clone(), top_k=4, **NAMED)
        for own, other in zip(got, alone, strict=True):
            assert torch.equal(own[t : t + 1], other)


def test_no_tokens(only_loops):
    got = route_topk(torch.zeros(0, 8), torch.zeros(8), top_k=3, **NAMED)
    assert [tuple(x.shape) for x in got] == [(0, 3), (0, 3), (0, 8), (0,)]


def test_what_is_left_to_the_reference(monkeypatch):
    calls = []
    monkeypatch.setattr(loops.reference, "route_topk", lambda *args, **named: calls.append(args))
    bias = torch.zeros(8)

    def is_left(tokens=2, bias=bias, **named):
        calls.clear()
        route_topk(torch.zeros(tokens, 8), bias, top_k=2, **NAMED, **named)
        return bool(calls)

    most = loops.MAX_SCORES // 8 // torch.get_num_threads()
    assert not is_left(tokens=most)
    assert is_left(tokens=most + 1)
    assert is_left(num_groups=2)
    assert is_left(activation="softmax")
    assert is_left(bias=bias.double())


def test_errors_are_those_of_the_reference():
    logits, bias = rand(2, 8), rand(8)
    with pytest.raises(ValueError, match="top_k 9"):
        route_topk(logits, bias, top_k=9, **NAMED)
    with pytest.raises(ValueError, match="'relu' is unknown"):
        route_topk(logits, bias, top_k=2, activation="relu", **NAMED)
