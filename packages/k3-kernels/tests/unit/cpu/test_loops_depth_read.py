"""depth_read as compiled loops: without gradients, which the battery asks for in every call."""

import pytest
import torch

from k3_core.ops.depth_read.reference import depth_read as reference
from k3_core.testing.tolerance import TOLERANCE, relative_error
from k3_core.testing.values import Values
from k3_kernels.depth_read import loops

D = 37
EPS = {"eps": 1e-6, "out_eps": 1e-3}


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


taken = pytest.mark.usefixtures("no_delegation")


def inputs(num_tokens, num_sources, has_added=True, dtype=torch.float64):
    v = Values(dtype, "cpu")
    *sources, prefix, added = [v.act(num_tokens, D, scale=1.0 + s) for s in range(num_sources + 2)]
    weights = v.act(D, scale=0.2) + 1.0, v.act(1, D), v.act(D, scale=0.2) + 1.0
    return [sources, prefix, added if has_added else None, *weights]


def change_tensors(change, args):
    sources, *rest = args
    changed = [None if x is None else change(x) for x in rest]
    return [[change(x) for x in sources], *changed]


@taken
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 200])
@pytest.mark.parametrize("num_sources, has_added", [(0, True), (1, False), (4, True)])
def test_sum_mix_and_norm(num_tokens, num_sources, has_added, dtype):
    args = inputs(num_tokens, num_sources, has_added, dtype)
    before = change_tensors(torch.clone, args)
    expected = reference(*change_tensors(torch.Tensor.double, args), **EPS)
    x, total = loops.depth_read(*args, **EPS)
    assert x.dtype == total.dtype == dtype
    assert relative_error(x, expected[0]) < TOLERANCE[dtype] / 4
    assert torch.equal(total, args[1] if args[2] is None else args[1] + args[2])
    assert (total is args[1]) == (not has_added)
    torch.testing.assert_close(args, before, rtol=0, atol=0)


@taken
def test_a_row_does_not_depend_on_the_others():
    args = inputs(3, 2, dtype=torch.float32)
    row = change_tensors(lambda x: x[1:2] if len(x) == 3 else x, args)
    alone = change_tensors(torch.clone, row)
    args[2][0, 5], args[0][1][2, 0] = float("nan"), float("inf")
    found, expected = loops.depth_read(*args, **EPS), loops.depth_read(*alone, **EPS)
    for whole, one in zip(found, expected, strict=True):
        assert torch.equal(whole[1:2], one)
    assert found[0][::2].isnan().all()


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("change", ["layout", "dtype"])
def test_what_is_left_to_others(number, change):
    args = inputs(3, 2, dtype=torch.float32)
    if change == "layout":
        args[number] = torch.stack((args[number], args[number]), dim=-1)[..., 0]
    else:
        args[number] = args[number].double()
    found, expected = loops.depth_read(*args, **EPS), reference(*args, **EPS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", range(1, 6))
def test_what_does_not_fit_is_an_error(number):
    args = inputs(3, 2)
    args[number] = args[number][..., 1:]
    with pytest.raises((ValueError, RuntimeError)):
        loops.depth_read(*args, **EPS)
