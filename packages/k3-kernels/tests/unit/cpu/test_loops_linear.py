"""linear as a loop: every number of rows, sums, what it leaves to torch."""

import pytest
import torch

from k3_core.ops.linear import reference
from k3_core.testing import relative_error
from k3_kernels.linear import loops


def rand(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "reference", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("rows", range(1, 20))
def test_every_number_of_rows(rows, has_added, dtype, only_loops):
    x, weight = rand(rows, 37, dtype=dtype), rand(23, 37, dtype=dtype)
    added = rand(rows, 23, dtype=dtype) if has_added else None
    expected = x.double() @ weight.double().T + (added.double() if has_added else 0)
    got = loops.linear(x, weight, add_to=added)
    assert got.dtype == dtype
    assert relative_error(got, expected) < (2e-7 if dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [7, 64, 96, 193])
def test_a_row_alone_is_the_same(width, dtype, only_loops):
    x, weight = rand(8, width, dtype=dtype), rand(13, width, dtype=dtype)
    alone = torch.cat([loops.linear(x[r : r + 1], weight) for r in range(8)])
    for rows in range(2, 9):
        assert torch.equal(loops.linear(x[:rows], weight), alone[:rows])


def test_strided_rows_and_more_dimensions(only_loops):
    x, weight = rand(2, 3, 40)[..., 8:24], rand(5, 16)
    assert relative_error(loops.linear(x, weight), x.double() @ weight.double().T) < 2e-7


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_of_a_wider_matrix_are_the_same(rows, only_loops):
    x, weight = rand(rows, 40), rand(5, 16)
    assert torch.equal(loops.linear(x[:, 8:24], weight), loops.linear(x[:, 8:24].clone(), weight))
    columns = x[:, ::2][:, :16]
    assert torch.equal(loops.linear(columns, weight), loops.linear(columns.clone(), weight))


def test_one_row_that_is_not_finite_stays_alone(only_loops):
    x, weight = rand(8, 32), rand(6, 32)
    x[3, 5] = torch.nan
    got = loops.linear(x, weight)
    assert got[3].isnan().all()
    assert relative_error(got[:3], x[:3].double() @ weight.double().T) < 2e-7
    assert got[4:].isfinite().all()


@pytest.mark.parametrize(
    ("rows", "dtype", "needs_grad"),
    [
        (loops.MAX_ROWS + 1, torch.float32, False),
        (3, torch.bfloat16, False),
        (3, torch.float32, True),
        (0, torch.float32, False),
    ],
    ids=["many-rows", "bfloat16", "gradients", "no-rows"],
)
def test_what_is_left_to_torch(rows, dtype, needs_grad, monkeypatch):
    calls = []

    class Spy:
        @staticmethod
        def linear(*args, **options):
            calls.append(args)
            return reference.linear(*args, **options)

    monkeypatch.setattr(loops, "reference", Spy)
    x, weight = rand(rows, 16, dtype=dtype), rand(4, 16, dtype=dtype).requires_grad_(needs_grad)
    got = loops.linear(x, weight)
    assert len(calls) == 1
    assert got.shape == (rows, 4) and got.requires_grad == needs_grad


def test_a_sum_with_gradients_leaves_what_was_added():
    x, weight, added = rand(3, 16), rand(4, 16).requires_grad_(), rand(3, 4)
    before = added.clone()
    loops.linear(x, weight, add_to=added).sum().backward()
    assert torch.equal(added, before)
    assert torch.allclose(weight.grad, x.sum(0).expand(4, -1))


def test_sizes_that_do_not_fit_raise():
    with pytest.raises(RuntimeError, match="shapes"):
        loops.linear(rand(3, 16), rand(4, 15))
