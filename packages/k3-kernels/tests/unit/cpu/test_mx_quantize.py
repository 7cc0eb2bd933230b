"""mx_quantize in float32 against the reference in float64: the same bytes for any weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.mx_quantize import reference
from k3_kernels.mx_quantize import cpu

LARGEST = 6.0 * 2.0**125


def assert_same(w):
    found, expected = cpu.mx_quantize(w), reference.mx_quantize(w)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.packed, expected.packed)


def test_every_bfloat16_value_below_every_block_maximum_nearby():
    """All 2^7 mantissas, both signs, against blocks whose largest value has any mantissa bits."""
    mantissa = torch.arange(128, dtype=torch.int32)
    values = (mantissa << 16 | 0x3F800000).view(torch.float32)  # 1 to 2
    scaled = values * torch.tensor([0.0625, 0.25, 0.5, 1.0, 2.0, 4.0])[:, None]
    lines = scaled.flatten().repeat_interleave(2)
    lines[1::2] *= -1
    blocks = torch.zeros(len(lines) // 16, 32)
    blocks[:, :16] = lines.view(-1, 16)
    blocks[:, 16] = values[torch.arange(len(blocks)) % 128] * 4
    assert_same(blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(exponent=st.integers(-150, 126), seed=st.integers(0, 2**20))
def test_random_weights_of_any_size(dtype, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 64, generator=generator, dtype=torch.float64) * 2.0 ** (exponent - 2)
    limit = min(LARGEST, torch.finfo(dtype).max)
    assert_same(w.clamp(-limit, limit).to(dtype))


def test_ties_zeros_and_both_ends():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.9]
    near = [torch.nextafter(torch.tensor(x), torch.tensor(y)) for x in ties for y in (0.0, 9.0)]
    row = torch.tensor([*ties, 0.0, -0.0, *near])
    blocks = torch.cat([row, -row, torch.zeros(-2 * len(row) % 32)]).view(-1, 32)
    assert_same(blocks)
    smallest = torch.full((1, 32), 2.0**-149)
    assert_same(torch.cat([torch.zeros(1, 32), smallest, torch.full((1, 32), LARGEST)]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_values_that_mxfp4_cannot_hold_are_refused(bad):
    w = torch.zeros(2, 32)
    w[1, 3] = bad
    with pytest.raises(ValueError, match="NaN, infinite or huge"):
        cpu.mx_quantize(w)
