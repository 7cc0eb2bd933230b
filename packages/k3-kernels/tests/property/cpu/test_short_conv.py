"""The convolution over all sequences at once against one sequence at a time, for any packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.short_conv import reference
from k3_kernels.short_conv import cpu

C = 3


@given(st.lists(st.integers(0, 7), max_size=5).map(tuple), st.integers(1, 5), st.integers(0, 2**20))
def test_results_and_gradients_equal_the_reference(kda, lengths, width, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), C), (C, 1, width), (len(lengths), C, width - 1))
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]

    def run(op):
        found = op(
            *leaves[:2],
            cu_seqlens_N1=kda.offsets(lengths),
            initial_state_NCW=leaves[2],
            output_final_state=True,
        )
        weights = torch.Generator().manual_seed(seed + 1)
        total = sum((x * torch.randn(x.shape, generator=weights).double()).sum() for x in found)
        return [*found, *torch.autograd.grad(total, leaves, materialize_grads=True)]

    kda.assert_close(run(cpu.short_conv), run(reference.short_conv), 1e-12)


def test_a_document_does_not_see_its_neighbour(kda):
    x = torch.randn(9, C)
    weight = torch.randn(C, 1, 4)
    changed = torch.cat([torch.full((4, C), float("nan")), x[4:]])
    results = [
        cpu.short_conv(y, weight, cu_seqlens_N1=kda.offsets((4, 5)), output_final_state=True)
        for y in (x, changed)
    ]
    assert torch.equal(results[0][0][4:], results[1][0][4:])
    assert torch.equal(results[0][1][1], results[1][1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_for_half_inputs(kda, dtype):
    x, weight = torch.randn(20, C, dtype=dtype), torch.randn(C, 1, 4)
    y, final = cpu.short_conv(x, weight, cu_seqlens_N1=kda.offsets((20,)), output_final_state=True)
    exact, _ = cpu.short_conv(x.float(), weight, cu_seqlens_N1=kda.offsets((20,)))
    assert y.dtype == final.dtype == dtype
    assert torch.equal(y, exact.to(dtype))
