"""attn_res as compiled loops: without gradients, which the battery asks for in every call."""

import pytest
import torch

from k3_core.ops.attn_res.reference import attn_res as reference
from k3_core.testing.tolerance import TOLERANCE, relative_error
from k3_core.testing.values import Values
from k3_kernels.attn_res import loops

D, EPS = 37, 1e-6


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


taken = pytest.mark.usefixtures("no_delegation")


def inputs(num_tokens, num_sources, dtype=torch.float64):
    v = Values(dtype, "cpu")
    values = [v.act(num_tokens, D, scale=1.0 + source) for source in range(num_sources)]
    return values, v.act(D, scale=0.2) + 1.0, v.act(1, D)


@taken
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 200])
@pytest.mark.parametrize("num_sources", [1, 4, loops.MAX_SOURCES])
def test_mix(num_tokens, num_sources, dtype):
    values, *weights = inputs(num_tokens, num_sources, dtype)
    expected = reference([x.double() for x in values], *(w.double() for w in weights), eps=EPS)
    found = loops.attn_res(values, *weights, eps=EPS)
    assert found.dtype == dtype and relative_error(found, expected) < TOLERANCE[dtype] / 4


@taken
def test_a_row_does_not_depend_on_the_others():
    values, *weights = inputs(3, 4, torch.float32)
    alone = loops.attn_res([x[1:2] for x in values], *weights, eps=EPS)
    values[2][0, 5], values[1][2, 0] = float("nan"), float("inf")
    found = loops.attn_res(values, *weights, eps=EPS)
    assert torch.equal(found[1:2], alone)
    assert found[0].isnan().all() and found[2].isnan().all()


@pytest.mark.parametrize("change", ["tokens", "sources", "layout", "dtype", "gradient"])
def test_what_is_left_to_others(change, monkeypatch):
    num_tokens = 3
    if change == "tokens":
        monkeypatch.setattr(loops, "MAX_VALUES", num_tokens * D * torch.get_num_threads() - 1)
    num_sources = loops.MAX_SOURCES + 1 if change == "sources" else 2
    values, *weights = inputs(num_tokens, num_sources, torch.float32)
    if change == "layout":
        values[0] = values[0].t().contiguous().t()
    if change == "dtype":
        values[0] = values[0].double()
    weights[0].requires_grad_(change == "gradient")
    found, expected = (op(values, *weights, eps=EPS) for op in (loops.attn_res, reference))
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == (change == "gradient")


@pytest.mark.parametrize("number", range(3))
def test_what_does_not_fit_is_an_error(number):
    values, norm, proj = inputs(3, 2)
    args = [[values[0], values[1][:, 1:]], norm, proj] if number == 0 else [values, norm, proj]
    if number:
        args[number] = args[number][..., 1:]
    with pytest.raises(RuntimeError):
        loops.attn_res(*args, eps=EPS)


def test_no_sources_are_an_error():
    with pytest.raises(ValueError, match="at least one source"):
        loops.attn_res([], *inputs(1, 1)[1:], eps=EPS)
