"""linear beyond the conformance cases: every form of the kernel, sums in place, what it leaves."""

import pytest
import torch

from k3_core.testing import relative_error
from k3_kernels.linear import op
from k3_kernels.linear.op import choose_tile, linear


def _draw(device, num_rows, width, num_out):
    generator = torch.Generator().manual_seed(num_rows + width)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    shapes = (num_rows, width), (num_out, width), (num_rows, num_out)
    x, weight, added = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    return x, weight / width**0.5, added


@pytest.mark.parametrize(
    ("num_rows", "width", "num_out"),
    [
        (1, 48, 33),
        (3, 128, 70),
        (20, 80, 24),
        (64, 130, 65),
        (5, 600, 20),
        (33, 64, 2200),
        (50, 72, 600),
        (64, 66, 600),
    ],
)
def test_forms(device, num_rows, width, num_out):
    x, weight, added = _draw(device, num_rows, width, num_out)
    expected = x.double() @ weight.double().T
    assert relative_error(linear(x, weight), expected) < 5e-3
    total = expected + added
    assert relative_error(linear(x, weight, add_to=added), total) < 5e-3


@torch.no_grad()
def test_a_graph_takes_the_kernel(device):
    torch._dynamo.reset()
    x, weight, added = _draw(device, 3, 32, 24)

    def step(x, weight, added):
        y = linear(x, weight)
        return linear(y[:, :16], weight[:, :16], add_to=added), y

    expected = step(x, weight, added.clone())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, exact in zip(compiled(x, weight, added.clone()), expected, strict=True):
        assert torch.equal(got, exact)


def test_part_of_wider_rows_and_of_a_joined_weight(device):
    x, weight, _ = _draw(device, 5, 96, 40)
    got = linear(x[:, 16:64], weight[8:, 32:80])
    assert relative_error(got, x[:, 16:64].double() @ weight[8:, 32:80].double().T) < 5e-3


def test_rows_do_not_depend_on_one_another(device):
    x, weight, _ = _draw(device, 16, 64, 48)
    y = linear(x, weight)
    x[1:] = float("nan")
    assert torch.equal(linear(x, weight)[0], y[0])


def test_which_tiles_are_chosen():
    # A program a multiprocessor; else 64 outputs, with the fewest rows that run at once.
    assert choose_tile(64, 1024, 512, True) == (16, 16)
    assert choose_tile(64, 384, 512, True) == (16, 64)
    assert choose_tile(16, 384, 512, True) == (16, 16)
    assert choose_tile(64, 512, 1472, True) == (16, 64)
    assert choose_tile(64, 512, 4232, True) == (32, 64)
    assert choose_tile(64, 1024, 6144, True) == (32, 64)
    assert choose_tile(1, 512, 6144, True) == (16, 64)
    assert choose_tile(64, 512, 1472, False) == (16, 32)


@pytest.mark.parametrize("case", ["rows", "inputs", "float32", "gradient"])
def test_leaves_other_calls_to_torch(device, case, monkeypatch):
    for kernel in ("narrow_kernel", "wide_kernel"):
        monkeypatch.setattr(op, kernel, None)
    num_rows = op.MAX_ROWS + 1 if case == "rows" else 2
    x, weight, _ = _draw(device, num_rows, op.MAX_INPUTS + 8 if case == "inputs" else 16, 8)
    if case == "float32":
        x, weight = x.float(), weight.float()
    weight.requires_grad_(case == "gradient")
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
