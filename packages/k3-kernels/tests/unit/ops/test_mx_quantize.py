"""MXFP4 against the reference bit for bit, MXFP8 against torch's own cast and enumeration."""

import pytest
import torch

from k3_core.ops.mx_quantize.reference import mx_quantize as reference
from k3_kernels.mx_quantize.op import SCALE_RULES, mx_quantize, mxfp4_codes, mxfp8_quantize

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.0, 7.0, 7.99, 0.0)


def _values(device: str) -> torch.Tensor:
    """Random bit patterns, random scales, and every tie, [G, 32]."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (2048,), generator=generator)
    bits = bits.to(torch.int32).view(torch.float32)
    bits = bits.where(bits.abs() <= 6 * 2.0**125, 0.0).view(-1, 32)
    powers = torch.exp2(torch.randint(-140, 100, (64, 1), generator=generator).float())
    scaled = torch.randn(64, 32, generator=generator) * powers
    ties = torch.tensor([[*TIES, *(-t for t in TIES), *(0.0,) * 8]])
    return torch.cat((bits, scaled, ties, 2.0**-126 * ties, torch.zeros(1, 32))).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mxfp4_equals_the_reference(dtype, device):
    w = _values(device).clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else _values(device)
    got, expected = mx_quantize(w), reference(w.cpu())
    assert torch.equal(got.scale.cpu(), expected.scale)
    assert torch.equal(got.packed.cpu(), expected.packed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 7 * 2.0**125])
def test_values_without_a_code(bad, device):
    w = torch.ones(3, 64).to(device)
    w[1, 40] = bad
    _, scale = mxfp4_codes(w)
    assert (scale == 255).nonzero().tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="Find the layer that diverged"):
        mx_quantize(w)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_mxfp8(rule, device):
    w = _values(device)
    codes, scale = (x.cpu() for x in mxfp8_quantize(w, rule=rule))
    exact = w.cpu().double()
    largest = exact.abs().amax(1)
    exponent = torch.floor(torch.log2(largest)) - 8
    if rule == "ceil":
        # The least power of two by search, not by formula.
        exponent = torch.where(largest > 448 * torch.exp2(exponent), exponent + 1, exponent)
    byte = torch.where(largest > 0, exponent + 127, 0).clamp(min=0).to(torch.uint8)
    assert torch.equal(scale[:, 0], byte)
    units = exact / torch.exp2(byte.double() - 127)[:, None]
    expected = units.clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_mxfp8_uses_the_range(device):
    # An exponent that maps the largest value to 1 wastes eight bits of range (vllm pull 53110).
    codes, scale = mxfp8_quantize(torch.full((1, 32), 3.0).to(device))
    assert codes.float().unique().tolist() == [384.0]
    assert scale.tolist() == [[127 + 1 - 8]]


def test_mxfp8_special_blocks(device):
    w = torch.zeros(3, 32).to(device)
    w[1, 3], w[2, 4] = float("nan"), float("inf")
    codes, scale = mxfp8_quantize(w)
    assert scale.flatten().tolist() == [0, 255, 255]
    assert not codes[0].float().any() and codes[1:].float().isnan().all()


def test_errors(device):
    w = torch.ones(2, 33).to(device)
    with pytest.raises(ValueError, match="multiple of 32"):
        mx_quantize(w)
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8_quantize(w)
    with pytest.raises(ValueError, match="'nearest' is unknown"):
        mxfp8_quantize(w, rule="nearest")
