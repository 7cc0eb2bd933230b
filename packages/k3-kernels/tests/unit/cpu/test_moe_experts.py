"""The hand-written gradient of moe_experts on a CPU against autograd through the reference."""

import pytest
import torch
from torch.nn import functional as F

from k3_core.ops.moe_experts import reference
from k3_core.quant import MXTensor
from k3_kernels.moe_experts import cpu


def silu_glu(gate, up):
    return F.silu(gate) * up


def gradients(implementation, inputs, idx, stacks):
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = [stack if isinstance(stack, MXTensor) else leaves.pop() for stack in stacks]
    x, weight = leaves
    out = implementation(x, idx, weight, *plain, activation=silu_glu)
    out.square().sum().backward()
    grads = [leaf.grad for leaf in (x, weight, *plain) if isinstance(leaf, torch.Tensor)]
    return out, grads


def rand(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_gradients_of_all_inputs(num_tokens):
    idx = torch.randint(0, 6, (num_tokens, 2), generator=torch.Generator().manual_seed(0))
    w1, w3, w2 = rand(6, 3, 4, seed=1), rand(6, 3, 4, seed=2), rand(6, 4, 3, seed=3)
    inputs = [rand(num_tokens, 4, seed=4), rand(num_tokens, 2, seed=5), w2, w3, w1]
    found = gradients(cpu.moe_experts, inputs, idx, [w1, w3, w2])
    expected = gradients(reference.moe_experts, inputs, idx, [w1, w3, w2])
    torch.testing.assert_close(found, expected)


def test_packed_experts_pass_the_gradient_on_to_the_tokens():
    """A frozen quantised expert is trained through, for adapters in front of it."""
    generator = torch.Generator().manual_seed(0)

    def packed(*shape):
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator)
        scale = torch.full((*shape[:-1], shape[-1] // 32), 124)
        return MXTensor(data.to(torch.uint8), scale.to(torch.uint8))

    stacks = [packed(3, 32, 64), packed(3, 32, 64), packed(3, 64, 32)]
    idx = torch.tensor([[0, 2], [2, 1], [0, 1]])
    inputs = [rand(3, 64, seed=1), rand(3, 2, seed=2)]
    found = gradients(cpu.moe_experts, inputs, idx, stacks)
    expected = gradients(reference.moe_experts, inputs, idx, stacks)
    torch.testing.assert_close(found, expected)


def test_a_second_derivative_is_refused():
    x, weight = rand(2, 4, seed=0).requires_grad_(), rand(2, 1, seed=1)
    stacks = [rand(3, 3, 4, seed=2), rand(3, 3, 4, seed=3), rand(3, 4, 3, seed=4)]
    idx = torch.tensor([[0], [2]])
    out = cpu.moe_experts(x, idx, weight, *stacks, activation=silu_glu)
    with pytest.raises(RuntimeError, match=r"moe_experts\.reference"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_no_tokens():
    stacks = [rand(3, 3, 4, seed=2), rand(3, 3, 4, seed=3), rand(3, 4, 3, seed=4)]
    idx = torch.zeros(0, 2, dtype=torch.int64)
    out = cpu.moe_experts(rand(0, 4, seed=0), idx, rand(0, 2, seed=1), *stacks, activation=silu_glu)
    assert out.shape == (0, 4)


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_expert_that_does_not_exist_is_an_error(bad):
    stacks = [rand(3, 3, 4, seed=2), rand(3, 3, 4, seed=3), rand(3, 4, 3, seed=4)]
    idx = torch.tensor([[0, bad]])
    with pytest.raises(ValueError, match=r"allowed are 0\.\.2"):
        cpu.moe_experts(rand(1, 4, seed=0), idx, rand(1, 2, seed=1), *stacks, activation=silu_glu)
