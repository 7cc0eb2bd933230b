"""Kernels that take few rows another way than many: the same results from both."""

from functools import partial

import pytest
import torch

from k3_core.ops.moe_experts.reference import moe_experts as reference
from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.ops.situ_glu.reference import situ_glu as exact_situ_glu
from k3_core.testing import relative_error
from k3_kernels.attn_res import op as attn_res_op
from k3_kernels.depth_read.op import depth_read
from k3_kernels.hopper import has_gluon
from k3_kernels.moe_experts import op as experts_op
from k3_kernels.rms_norm.op import rms_norm
from k3_kernels.route_topk import op as route_op
from k3_kernels.situ_glu.op import situ_glu


def _randn(device, *shape):
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, generator=generator).to(device)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(100, 5), (130, 8), (6, 6)])
def test_choices_of_few_rows_are_those_of_many(num_experts, top_k, activation, device, monkeypatch):
    logits, bias = _randn(device, 7, num_experts), 0.1 * _randn(device, num_experts)
    logits[1] = 0.5
    logits[2] = float("nan")
    logits[3, ::2], logits[4, 3:] = float("nan"), -float("inf")
    logits[5, 1], bias[4] = float("inf"), bias[3]
    named = {"top_k": top_k, "renormalize": True, "scaling_factor": 2.0, "activation": activation}
    few = route_op.route_topk(logits, bias, **named)
    monkeypatch.setattr(route_op, "MAX_ROWS", 0)
    many = route_op.route_topk(logits, bias, **named)
    for got, expected in zip(few, many, strict=True):
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("num_sources", [1, 2, 4])
@pytest.mark.parametrize("has_added", [False, True])
def test_mixes_of_few_rows_are_those_of_many(num_sources, has_added, device, monkeypatch):
    values = [_randn(device, 3 + i, 48)[:3] for i in range(num_sources)]
    added = _randn(device, 9, 48)[:3] if has_added else None
    norm, proj, out_norm = _randn(device, 48), _randn(device, 1, 48), _randn(device, 48)

    def read():
        named = {"eps": 1e-5, "out_eps": 1e-6}
        return depth_read(values[:-1], values[-1], added, norm, proj, out_norm, **named)

    few = read()
    monkeypatch.setattr(attn_res_op, "MAX_WHOLE", 0)
    many = read()
    assert relative_error(few[0], many[0]) < 1e-6
    assert torch.equal(few[1], many[1])


def test_a_mix_does_not_depend_on_other_rows(device):
    values, norm, proj = [_randn(device, 5, 32)] * 3, _randn(device, 32), _randn(device, 1, 32)
    mix = attn_res_op.attn_res(values, norm, proj, eps=1e-5)
    one = attn_res_op.attn_res([value[2:3] for value in values], norm, proj, eps=1e-5)
    assert torch.equal(one, mix[2:3])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_skewed", [False, True])
def test_experts_without_a_plan_are_those_with_one(is_skewed, is_packed, device, monkeypatch):
    monkeypatch.setattr(experts_op, "check_routes", lambda *args: None)
    shapes = (6, 32, 64), (6, 32, 64), (6, 64, 32)
    stacks = [_randn(device, *shape) for shape in shapes]
    if is_packed:
        stacks = [mx_quantize(stack) for stack in stacks]
    x, weight = _randn(device, 20, 64), _randn(device, 20, 2)
    idx = torch.randint(-1, 7, (20, 2), generator=torch.Generator().manual_seed(0)).to(device)
    if is_skewed:
        idx[1:, 0] = 4
    act = partial(situ_glu, beta=4.0, linear_beta=25.0)
    args = (x, idx, weight, *stacks)
    few = experts_op.moe_experts(*args, activation=act)
    monkeypatch.setattr(experts_op, "MAX_UNPLANNED", 0)
    assert torch.equal(few, experts_op.moe_experts(*args, activation=act))


def test_which_experts_take_one_launch(monkeypatch):
    shapes = (3, 192, 256), (3, 192, 256), (3, 256, 192)
    stacks = tuple(torch.zeros(shape, dtype=torch.float16) for shape in shapes)
    x, takes = torch.zeros(20, 256, dtype=torch.float16), experts_op.takes_one_launch
    assert not takes(x, 160, stacks)
    monkeypatch.setattr(experts_op, "has_gluon", lambda device: True)
    assert takes(x, 160, stacks)
    assert not takes(x, experts_op.MAX_UNPLANNED + 1, stacks)
    assert not takes(x.float(), 160, tuple(stack.float() for stack in stacks))
    assert not takes(x, 160, tuple(stack[:, :96, :96] for stack in stacks))
    assert not takes(x, 160, tuple(mx_quantize(stack) for stack in stacks))


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_gluon(torch.device("cuda", 0))),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_launch_gives_the_bits_of_two(dtype, width, is_skewed, monkeypatch):
    monkeypatch.setattr(experts_op, "check_routes", lambda *args: None)
    shapes = (30, 192, width), (30, 192, width), (30, width, 192)
    stacks = [_randn("cuda", *shape).to(dtype) / shape[2] ** 0.5 for shape in shapes]
    x, weight = (_randn("cuda", 60, n).to(dtype) for n in (width, 8))
    idx = torch.randint(-1, 31, (60, 8), generator=torch.Generator().manual_seed(0)).cuda()
    if is_skewed:
        idx[1:, 0] = 4
    act = partial(situ_glu, beta=4.0, linear_beta=25.0)
    one = experts_op.moe_experts(x, idx, weight, *stacks, activation=act)
    monkeypatch.setattr(experts_op, "takes_one_launch", lambda *args: False)
    two = experts_op.moe_experts(x, idx, weight, *stacks, activation=act)
    assert two.isfinite().all()
    assert torch.equal(one, two)


@pytest.mark.parametrize("width", [48, 64])
def test_the_norm_of_a_sum_of_routes(width, device, monkeypatch):
    stacks = [_randn(device, *shape) for shape in ((4, 32, width), (4, 32, width), (4, width, 32))]
    idx = torch.rand(9, 4, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :2].to(device)
    args = (_randn(device, 9, width), idx, _randn(device, 9, 2), *stacks)
    named = {"activation": partial(situ_glu, beta=4.0, linear_beta=25.0)}
    weight = _randn(device, width)
    got = experts_op.moe_experts(*args, **named, norm=(weight, 1e-5))
    apart = rms_norm(experts_op.moe_experts(*args, **named), weight, eps=1e-5)
    assert relative_error(got, apart) < 1e-6
    monkeypatch.setattr(experts_op, "MAX_NORMED", 16)
    assert torch.equal(experts_op.moe_experts(*args, **named, norm=(weight, 1e-5)), apart)


def test_the_norm_of_a_sum_of_routes_has_gradients(device):
    stacks = [_randn(device, *shape) for shape in ((3, 16, 16), (3, 16, 16), (3, 16, 16))]
    idx = torch.tensor([[0, 1], [2, 1]], device=device)
    x, weight = _randn(device, 2, 16), _randn(device, 16).requires_grad_()
    named = {"activation": partial(situ_glu, beta=4.0, linear_beta=25.0)}
    args = (x, idx, _randn(device, 2, 2), *stacks)
    experts_op.moe_experts(*args, **named, norm=(weight, 1e-5)).sum().backward()
    exact = weight.detach().double().requires_grad_()
    wide = (t if t.dtype == torch.int64 else t.double() for t in args)
    named = {"activation": partial(exact_situ_glu, beta=4.0, linear_beta=25.0)}
    reference(*wide, **named, norm=(exact, 1e-5)).sum().backward()
    assert relative_error(weight.grad, exact.grad) < 1e-5
