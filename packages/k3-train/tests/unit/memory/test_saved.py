"""What the hooks share, leave alone and let go."""

import gc

import torch
from torch import nn

from k3_train.memory.base import MemoryPolicy, Packed
from k3_train.memory.fp8 import FP8
from k3_train.memory.saved import Saver


class Cabinet(MemoryPolicy):
    """Copies every tensor and keeps count."""

    def __init__(self, order=0):
        super().__init__(torch.device("cpu"))
        self.order, self.packed = order, []

    def wants(self, x):
        return x.is_floating_point()

    def pack(self, values_N):
        assert values_N.dim() == 1
        assert not values_N.requires_grad
        self.packed.append(values_N.clone())
        return Packed((self.packed[-1],), lambda copy_N: copy_N)


def test_a_tensor_and_its_views_are_packed_once():
    def value(x):
        y = x * 2
        left, right = y.chunk(2, dim=-1)
        return torch.sin(y).sum() + (left * right).sum() + (y.t() @ y).sum()

    policy = Cabinet()
    x = torch.randn(6, 8, requires_grad=True)
    with Saver([policy]).hooks():
        z = value(x)
    assert [len(values_N) for values_N in policy.packed] == [48]
    (grad,) = torch.autograd.grad(z, x)
    assert torch.equal(grad, torch.autograd.grad(value(x), x)[0])


def test_memory_that_is_used_again_is_not_taken_for_what_it_held():
    policy = Cabinet()
    saver = Saver([policy])
    x = torch.ones(1000, requires_grad=True)
    for number in range(1, 20):  # the allocator hands out the same address
        with saver.hooks():
            y = torch.exp(x * number)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(grad, number * torch.exp(torch.tensor(float(number))))
    assert not saver._units


def test_what_changed_in_place_is_packed_again():
    policy = Cabinet()
    x = torch.ones(4, requires_grad=True)
    with Saver([policy]).hooks():
        y = x * 1
        a = y * y
        y.add_(1)
        b = y * y
    assert len(policy.packed) == 2
    (a + b).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0 + 4.0))


def test_parameters_stay_in_every_form():
    policy = Cabinet()
    weight, other = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    x = torch.randn(3, 8)
    with Saver([policy]).hooks(), torch.autocast("cpu", torch.bfloat16):
        joined = torch.cat((weight, other))
        y = nn.functional.linear(x, joined) + nn.functional.linear(x, weight.t()).repeat(1, 2)
    assert {tuple(values_N.shape) for values_N in policy.packed} == {(24,)}  # x, and x in bfloat16
    y.float().sum().backward()
    assert weight.grad is not None


def test_a_tensor_in_a_larger_buffer_is_packed_alone():
    policy = Cabinet()
    buffer = torch.full((100,), float("nan"))
    x = buffer[10:14].detach().clone().requires_grad_()
    inside = torch.empty(0).set_(buffer.untyped_storage(), 10, (4,)).fill_(3.0)
    with Saver([policy]).hooks():
        (x * inside).sum().backward()
    assert [values_N.tolist() for values_N in policy.packed] == [[3.0] * 4]
    assert torch.equal(x.grad, torch.full((4,), 3.0))


def test_each_policy_packs_the_parts_of_the_one_before():
    fp8, cabinet = FP8(torch.device("cpu")), Cabinet(order=30)
    x = torch.randn(64, 128, requires_grad=True)
    with Saver([cabinet, fp8]).hooks():
        y = torch.tanh(x * 1)
    scales = [values_N for values_N in cabinet.packed if values_N.dtype == torch.float32]
    codes = [values_N for values_N in cabinet.packed if values_N.dtype == torch.float8_e4m3fn]
    assert [len(values_N) for values_N in codes] == [64 * 128]
    assert [len(values_N) for values_N in scales] == [64]
    y.sum().backward()
    exact = 1 - torch.tanh(x.detach()) ** 2
    assert 0 < float((x.grad - exact).abs().max()) < 0.13


def test_an_output_that_is_kept_does_not_keep_itself(make_census):
    gc.disable()
    try:
        x = torch.randn(1000, requires_grad=True)
        with make_census() as census:
            with Saver([]).hooks():
                y = torch.exp(x)
            assert census.num_bytes() == 4000
            del y
            assert census.num_bytes() == 0
    finally:
        gc.enable()
