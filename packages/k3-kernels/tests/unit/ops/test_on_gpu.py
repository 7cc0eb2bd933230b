"""What only a GPU shows: graph capture without a host read, and sizes that fill the card."""

from functools import partial

import pytest
import torch

from k3_core.ops.moe_experts.reference import moe_experts as experts_reference
from k3_core.quant import MXTensor
from k3_core.testing import relative_error
from k3_core.testing.cases import flatten, op_cases
from k3_core.testing.values import Values
from k3_kernels.gated_rms_norm.op import gated_rms_norm
from k3_kernels.moe_experts import op
from k3_kernels.moe_experts.op import TILE_NARROW, TILES, moe_experts
from k3_kernels.ops_declare import IMPLS
from k3_kernels.situ_glu.op import situ_glu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPTURED = [
    pytest.param(impl, case, id=f"{impl.implements}-{case.name}")
    for impl in IMPLS
    if "graph_safe" in impl.features
    for case in op_cases(impl.implements)
    # Several groups are left to the reference; no rows give an empty graph.
    if case.features <= impl.features and case.name not in ("groups-softmax", "no-tokens")
]


@pytest.mark.parametrize(("impl", "case"), CAPTURED)
def test_capture_and_replay(impl, case):
    dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else torch.float32
    call = case.make(Values(dtype, "cuda"))
    function = partial(impl.load(), *call.args, **call.kwargs)
    expected = [x.clone() for x in flatten(function())]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = flatten(function())
    for _ in range(2):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_more_rows_than_a_grid_axis_holds():
    # The second and third axes of a grid end at 65,535 (flash-linear-attention pull 1077).
    x = torch.randn(70_000, 32, 128, device="cuda", dtype=torch.bfloat16)
    y = gated_rms_norm(x, torch.ones(128, device="cuda"), torch.full_like(x, 30.0), eps=1e-5)
    assert (
        relative_error(y[-1], x[-1].double() * x[-1].double().square().mean(-1, True).rsqrt())
        < 1e-2
    )


@pytest.mark.parametrize("tokens", [3, 200, 2000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_experts_at_released_widths(tokens, is_packed):
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((24, 3072, 3584), (24, 3072, 3584), (24, 3584, 3072))
    like = {"device": "cuda", "generator": generator}
    stacks = []
    for e, out, columns in shapes:
        packed = torch.randint(256, (e, out, columns // 2), dtype=torch.uint8, **like)
        scale = torch.randint(115, 121, (e, out, columns // 32), dtype=torch.uint8, **like)
        stack = MXTensor(packed, scale)
        stacks.append(stack if is_packed else stack.dequantize(torch.bfloat16))
    x = torch.randn(tokens, 3584, **like).to(torch.bfloat16)
    idx = torch.rand(tokens, 24, **like).argsort(1)[:, :4]
    weight = torch.rand(tokens, 4, **like)
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    got = moe_experts(x, idx, weight, *stacks, activation=activation)
    expected = experts_reference(x.float(), idx, weight, *stacks, activation=activation)
    assert relative_error(got, expected) < 1e-2


@pytest.mark.parametrize("width", [128, 256, 512, 1024])
@pytest.mark.parametrize("tile", sorted({tile for _, tile, _ in TILES} | {TILE_NARROW}))
def test_experts_of_few_steps(tile, width, monkeypatch):
    # ptxas of Triton 3.6 unrolled a loop of four known steps, and the up-projection was wrong then.
    monkeypatch.setattr(op, "TILES", ((float("inf"), tile, tile),))
    monkeypatch.setattr(op, "NARROW", 0)
    generator = torch.Generator(device="cuda").manual_seed(0)
    like = {"device": "cuda", "generator": generator}
    shapes = ((6, 64, width), (6, 64, width), (6, width, 64))
    stacks = [(torch.randn(*s, **like) * s[-1] ** -0.5).to(torch.bfloat16) for s in shapes]
    x = torch.randn(40, width, **like).to(torch.bfloat16)
    idx = torch.rand(40, 6, **like).argsort(1)[:, :2]
    weight = torch.rand(40, 2, **like)
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    got = moe_experts(x, idx, weight, *stacks, activation=activation)
    exact = (x.float(), idx, weight, *(w.float() for w in stacks))
    assert relative_error(got, experts_reference(*exact, activation=activation)) < 1e-2
