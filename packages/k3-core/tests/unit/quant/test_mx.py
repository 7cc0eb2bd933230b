"""MXFP4 decoding and quantising against exact enumeration in plain Python."""

import math

import pytest
import torch

from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.quant import E2M1_VALUES, MXTensor, bad_scale

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _value(code: int) -> float:
    """E2M1 by its definition: sign, two exponent bits (bias 1), one mantissa bit."""
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return sign * magnitude


def _all_codes(scale: int) -> MXTensor:
    """One row with every code twice: even columns 0..15, odd columns 15..0."""
    packed = torch.tensor([[code | (15 - code) << 4 for code in range(16)]], dtype=torch.uint8)
    return MXTensor(packed, torch.tensor([[scale]], dtype=torch.uint8))


def test_code_values_are_e2m1():
    assert [_value(code) for code in range(16)] == list(E2M1_VALUES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_with_every_scale_decodes_exactly(dtype):
    for scale in range(253):
        row = _all_codes(scale).dequantize(dtype)[0]
        expected = [_value(code) * 2.0 ** (scale - 127) for c in range(16) for code in (c, 15 - c)]
        assert row.dtype == dtype and row.double().tolist() == expected


def test_scale_byte_zero_is_not_zero():
    assert _all_codes(0).dequantize()[0, 2].item() == 2.0**-128


def test_scales_that_cannot_be_used_are_named():
    assert bad_scale(torch.tensor([0, 127, 252], dtype=torch.uint8)) is None
    assert "255 is NaN" in (bad_scale(torch.tensor([[1, 255]], dtype=torch.uint8)) or "")
    assert "253" in (bad_scale(torch.tensor([253], dtype=torch.uint8)) or "")


def test_golden_experts_decode_as_the_formula_says(golden):
    from safetensors.torch import load_file

    stored = load_file(golden("mxfp4_tiny") / "model.safetensors")
    base = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    packed, scale = stored[f"{base}_packed"], stored[f"{base}_scale"]
    weight = MXTensor(packed, scale).dequantize()
    for row, column in ((0, 0), (5, 1), (63, 31), (17, 16)):
        byte = int(packed[row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        expected = _value(code) * 2.0 ** (int(scale[row, column // 32]) - 127)
        assert weight[row, column].item() == expected


def test_nearest_value_ties_to_even_and_saturation():
    """Against the definition: nearest grid value, of two the one with the even code."""
    points = [i / 16 for i in range(0, 16 * 8)]
    row = torch.zeros(len(points), 32, dtype=torch.float64)
    row[:, 0] = 4.0  # fixes the scale to 1 for values below 8
    row[:, 1] = torch.tensor(points, dtype=torch.float64)
    decoded = mx_quantize(row).dequantize(torch.float64)[:, 1].tolist()
    for point, value in zip(points, decoded, strict=True):
        order = sorted(range(8), key=lambda code: (abs(GRID[code] - point), code % 2))
        assert value == GRID[order[0]]


def test_scale_is_the_floor_rule():
    for largest in (1.0, 1.99, 2.0, 5.9, 6.0, 7.99, 8.0, 0.3, 1e-20):
        row = torch.zeros(1, 32, dtype=torch.float64)
        row[0, 7] = -largest
        expected = math.floor(math.log2(largest)) - 2 + 127
        assert mx_quantize(row).scale.item() == expected


@pytest.mark.parametrize("scale", [0, 1, 120, 127, 252])
def test_canonical_blocks_come_back_bit_for_bit(scale):
    """A block whose largest code is 4 or 6 is what quantising produces."""
    tensor = _all_codes(scale)
    again = mx_quantize(tensor.dequantize(torch.float64))
    assert torch.equal(again.packed, tensor.packed) and torch.equal(again.scale, tensor.scale)


def test_zero_block_and_tiny_values():
    zero = mx_quantize(torch.zeros(2, 64))
    assert zero.dequantize().count_nonzero() == 0 and zero.scale.unique().tolist() == [0]
    again = mx_quantize(zero.dequantize())
    assert torch.equal(again.packed, zero.packed) and torch.equal(again.scale, zero.scale)
    tiny = torch.full((1, 32), 2.0**-140, dtype=torch.float64)
    assert mx_quantize(tiny).dequantize(torch.float64).count_nonzero() == 0


@pytest.mark.parametrize("shape", [(4, 48), (31,), (2, 3, 33)])
def test_width_that_is_no_multiple_of_32_is_named(shape):
    with pytest.raises(ValueError, match=r"multiple of 32.*" + str(shape)[1:-1].rstrip(",")):
        mx_quantize(torch.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_values_that_cannot_be_stored_are_an_error(value):
    weight = torch.ones(2, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match=r"\(2, 64\).*NaN, infinite or huge"):
        mx_quantize(weight)


def test_other_block_sizes_are_refused():
    with pytest.raises(ValueError, match="block = 16"):
        mx_quantize(torch.zeros(2, 64), block=16)


def test_shapes_bytes_and_indexing():
    weight = mx_quantize(torch.randn(5, 4, 96, generator=torch.Generator().manual_seed(0)))
    assert weight.shape == (5, 4, 96) and weight.nbytes == 5 * 4 * (48 + 3)
    assert torch.equal(weight[2].dequantize(), weight.dequantize()[2])
    assert weight.nbytes / math.prod(weight.shape) <= 0.6


def test_mismatched_parts_are_refused():
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not match"):
        MXTensor(packed, torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"must be torch\.uint8"):
        MXTensor(packed, torch.zeros(2, 2))
