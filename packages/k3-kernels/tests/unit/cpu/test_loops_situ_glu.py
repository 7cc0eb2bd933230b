"""situ_glu as a loop: halves of a joined projection, saturation, NaN, what it leaves to torch."""

import pytest
import torch

from k3_core.ops.situ_glu.reference import situ_glu as reference
from k3_core.testing import relative_error
from k3_kernels.situ_glu import loops

BETAS = {"beta": 4.0, "linear_beta": 25.0}


def rand(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "cpu", None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("rows", [1, 5])
def test_halves_of_a_joined_projection(rows, linear_beta, dtype, tolerance, only_loops):
    gate, up = rand(rows, 74, dtype=dtype).split(37, -1)
    got = loops.situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
    expected = reference(gate.double(), up.double(), beta=4.0, linear_beta=linear_beta)
    assert got.dtype == dtype
    assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT,
        lambda x: x[:, ::3],
        lambda x: x[:1].expand(4, -1),
        lambda x: x[0],
        lambda x: x[0, 0],
        lambda x: x.unflatten(-1, (2, 6)).transpose(0, 1),
    ],
    ids=["transposed", "every-third", "repeated", "one-dimension", "a-number", "three-dimensions"],
)
def test_any_strides(view, only_loops):
    gate, up = (view(x) for x in rand(8, 12).chunk(2))
    got = loops.situ_glu(gate, up, **BETAS)
    expected = reference(gate.double(), up.double(), **BETAS)
    assert got.shape == gate.shape
    assert relative_error(got, expected) < 2e-7


def test_a_row_alone_is_the_same(only_loops):
    gate, up = rand(9, 130).split(65, -1)
    got = loops.situ_glu(gate, up, **BETAS)
    rows = [loops.situ_glu(gate[t : t + 1], up[t : t + 1], **BETAS) for t in range(9)]
    assert torch.equal(got, torch.cat(rows))


@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_values(linear_beta, dtype, only_loops):
    ends = torch.tensor([-1e30, -1000.0, -80.0, -1e-20, 0.0, 1e-20, 80.0, 1000.0, 1e30])
    gate, up = torch.cartesian_prod(ends, ends).to(dtype).unbind(-1)
    got = loops.situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
    expected = reference(gate.double(), up.double(), beta=4.0, linear_beta=linear_beta)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_nan_stays_where_it_is(linear_beta, only_loops):
    gate, up = rand(2, 40)
    gate[3] = up[20] = float("nan")
    got = loops.situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
    assert got.isnan().nonzero().flatten().tolist() == [3, 20]


def test_many_values_are_left_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(loops.cpu, "situ_glu", lambda *args, **named: calls.append(named))
    for more in (0, 1):
        gate = torch.zeros(loops.MAX_VALUES // torch.get_num_threads() + more)
        loops.situ_glu(gate, gate, **BETAS)
        assert len(calls) == more


def test_shapes_that_differ_are_an_error():
    with pytest.raises(ValueError, match="differ"):
        loops.situ_glu(torch.zeros(2, 3), torch.zeros(2, 4), **BETAS)
