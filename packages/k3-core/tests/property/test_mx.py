"""MXFP4 properties on arbitrary blocks: bounded error, fixed points, sign symmetry."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.mx_quantize.reference import mx_quantize

FLOATS = st.floats(-1e6, 1e6, allow_nan=False, width=32)
BLOCKS = st.lists(FLOATS, min_size=32, max_size=32).map(
    lambda values: torch.tensor([values], dtype=torch.float64)
)


@given(BLOCKS)
def test_error_is_at_most_half_a_step_or_the_saturated_part(block):
    decoded = mx_quantize(block).dequantize(torch.float64)
    unit = 2.0 ** (mx_quantize(block).scale.double() - 127)
    magnitude = block.abs() / unit
    # Half the distance between neighbours: .25 below 2, .5 below 4, 1 below 6; then saturation.
    bound = torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))
    bound = torch.where(magnitude > 6, magnitude - 6, bound)
    assert ((decoded - block).abs() / unit <= bound * (1 + 1e-12)).all()


@given(BLOCKS)
def test_quantising_again_changes_nothing(block):
    decoded = mx_quantize(block).dequantize(torch.float64)
    assert torch.equal(mx_quantize(decoded).dequantize(torch.float64), decoded)


@given(BLOCKS, st.integers(-20, 20))
def test_powers_of_two_and_signs_commute_with_quantising(block, exponent):
    scaled = torch.where(block.abs() < 1e-3, 0.0, block)
    factor = -(2.0**exponent)
    expected = mx_quantize(scaled).dequantize(torch.float64) * factor
    assert torch.equal(mx_quantize(scaled * factor).dequantize(torch.float64), expected)
