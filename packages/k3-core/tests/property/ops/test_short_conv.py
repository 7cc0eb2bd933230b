"""The convolution against torch's own, for any packing (architecture 3.2 step 1)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.short_conv import cpu, reference

LENGTHS = st.lists(st.integers(0, 7), max_size=5).map(tuple)
OPS = pytest.mark.parametrize("op", [cpu.short_conv, reference.short_conv])
C = 3


def by_conv1d(x_TC, weight_C1W, lengths, state_NCW):
    """Outputs and last W - 1 inputs of each sequence with its state in front."""
    outputs, finals = [x_TC[:0]], []
    for x_LC, state_CW in zip(x_TC.split(lengths), state_NCW, strict=True):
        padded = torch.cat([state_CW, x_LC.t()], dim=1)
        if len(x_LC):
            outputs.append(F.silu(F.conv1d(padded[None], weight_C1W, groups=C))[0].t())
        finals.append(padded[:, padded.shape[1] - state_CW.shape[1] :])
    return torch.cat(outputs), torch.stack(finals) if finals else state_NCW


@OPS
@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**20))
def test_results_and_gradients_equal_conv1d(kda, op, lengths, width, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), C), (C, 1, width), (len(lengths), C, width - 1))
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    x, weight, state = leaves
    actual = op(
        x,
        weight,
        cu_seqlens_N1=kda.offsets(lengths),
        initial_state_NCW=state,
        output_final_state=True,
    )
    expected = by_conv1d(x, weight, lengths, state)
    kda.assert_close(list(actual), list(expected), 1e-12)

    d_y, d_final = (torch.randn(a.shape, generator=generator, dtype=a.dtype) for a in expected)
    found, wanted = (
        torch.autograd.grad(
            (y * d_y).sum() + (final * d_final).sum(), leaves, materialize_grads=True
        )
        for y, final in (actual, expected)
    )
    kda.assert_close(list(found), list(wanted), 1e-12)


@OPS
def test_a_document_does_not_see_its_neighbour(kda, op):
    x = torch.randn(9, C)
    weight = torch.randn(C, 1, 4)
    changed = torch.cat([torch.full((4, C), float("nan")), x[4:]])
    results = [
        op(y, weight, cu_seqlens_N1=kda.offsets((4, 5)), output_final_state=True)
        for y in (x, changed)
    ]
    assert torch.equal(results[0][0][4:], results[1][0][4:])
    assert torch.equal(results[0][1][1], results[1][1][1])


@OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_for_half_inputs(kda, op, dtype):
    x, weight = torch.randn(20, C, dtype=dtype), torch.randn(C, 1, 4)
    y, final = op(x, weight, cu_seqlens_N1=kda.offsets((20,)), output_final_state=True)
    exact, _ = op(x.float(), weight, cu_seqlens_N1=kda.offsets((20,)))
    assert y.dtype == final.dtype == dtype
    assert torch.equal(y, exact.to(dtype))
