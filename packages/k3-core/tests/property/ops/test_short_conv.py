"""The convolution against torch's own, for any packing (architecture 3.2 step 1)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.short_conv.reference import short_conv

LENGTHS = st.lists(st.integers(0, 7), max_size=5).map(tuple)
C = 3


def offsets(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def by_conv1d(x_TC, weight_C1W, lengths, state_NCW):
    """Outputs and last W - 1 inputs of each sequence with its state in front."""
    outputs, finals = [x_TC[:0]], []
    for x_LC, state_CW in zip(x_TC.split(lengths), state_NCW, strict=True):
        padded = torch.cat([state_CW, x_LC.t()], dim=1)
        if len(x_LC):
            outputs.append(F.silu(F.conv1d(padded[None], weight_C1W, groups=C))[0].t())
        finals.append(padded[:, padded.shape[1] - state_CW.shape[1] :])
    return torch.cat(outputs), torch.stack(finals) if finals else state_NCW


@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**20))
def test_results_and_gradients_equal_conv1d(lengths, width, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), C), (C, 1, width), (len(lengths), C, width - 1))
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    x, weight, state = leaves
    actual = short_conv(
        x,
        weight,
        cu_seqlens_N1=offsets(lengths),
        initial_state_NCW=state,
        output_final_state=True,
    )
    expected = by_conv1d(x, weight, lengths, state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    d_y, d_final = (torch.randn(a.shape, generator=generator, dtype=a.dtype) for a in expected)
    found, wanted = (
        torch.autograd.grad(
            (y * d_y).sum() + (final * d_final).sum(), leaves, materialize_grads=True
        )
        for y, final in (actual, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_document_does_not_see_its_neighbour():
    x = torch.randn(9, C)
    weight = torch.randn(C, 1, 4)
    changed = torch.cat([torch.full((4, C), float("nan")), x[4:]])
    results = [
        short_conv(y, weight, cu_seqlens_N1=offsets((4, 5)), output_final_state=True)
        for y in (x, changed)
    ]
    assert torch.equal(results[0][0][4:], results[1][0][4:])
    assert torch.equal(results[0][1][1], results[1][1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_for_half_inputs(dtype):
    x, weight = torch.randn(20, C, dtype=dtype), torch.randn(C, 1, 4)
    y, final = short_conv(x, weight, cu_seqlens_N1=offsets((20,)), output_final_state=True)
    exact, _ = short_conv(x.float(), weight, cu_seqlens_N1=offsets((20,)))
    assert y.dtype == final.dtype == dtype
    assert torch.equal(y, exact.to(dtype))
