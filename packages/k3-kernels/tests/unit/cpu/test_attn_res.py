"""attn_res in plain torch: its closed-form gradients against autograd through the reference."""

import pytest
import torch

from k3_core.ops.attn_res import reference
from k3_kernels.attn_res import cpu

T, D = 6, 10


def leaves(num_sources, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_sources)
    shapes = [*[(T, D)] * num_sources, (D,), (1, D)]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def run(op, inputs, eps=1e-3):
    *values, norm, proj = inputs
    return op.attn_res(values, norm, proj, eps=eps)


@pytest.mark.parametrize("num_sources", [1, 2, 9])
def test_gradients_of_all_inputs(num_sources):
    inputs = leaves(num_sources)
    weight = torch.randn(T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = (
        [out, *torch.autograd.grad((out * weight).sum(), inputs)]
        for out in (run(cpu, inputs), run(reference, inputs))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_only_some_inputs_need_a_gradient():
    *values, norm, proj = leaves(3)
    fixed = [values[0].detach(), values[1], values[2].detach(), norm.detach(), proj]
    found, expected = (
        torch.autograd.grad(run(op, fixed).sum(), [values[1], proj]) for op in (cpu, reference)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_autocast_changes_nothing():
    """Its matrix products would be cast to 16 bits otherwise."""
    inputs = leaves(3, torch.float32)
    plain = run(cpu, inputs)
    grads = torch.autograd.grad(plain.sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(cpu, inputs)
        cast_grads = torch.autograd.grad(cast.sum(), inputs)
    assert torch.equal(plain, cast) and all(map(torch.equal, grads, cast_grads))


def test_sources_of_two_dtypes_give_that_of_the_last():
    *values, norm, proj = leaves(2, torch.float32)
    mixed = [values[0].bfloat16(), values[1], norm, proj]
    torch.testing.assert_close(run(cpu, mixed), run(reference, mixed))
    assert run(cpu, [values[1], values[0].bfloat16(), norm, proj]).dtype == torch.bfloat16


def test_refusals():
    inputs = leaves(2)
    with pytest.raises(ValueError, match="at least one source"):
        run(cpu, inputs[2:])
    with pytest.raises(RuntimeError, match=r"attn_res\.reference"):
        torch.autograd.grad(run(cpu, inputs).sum(), inputs[:1], create_graph=True)
