"""FP8 blocks by Triton against plain torch."""

import pytest
import torch

from k3_kernels.fp8_blocks import cpu
from k3_kernels.fp8_blocks.kernel import dequantize_kernel
from k3_kernels.fp8_blocks.op import dequantize, quantize

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("size", [1, 128, 4095, 4096, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_plain_torch(size, dtype, device):
    generator = torch.Generator().manual_seed(size)
    spread = 10 ** torch.empty(size).uniform_(-4, 0, generator=generator)
    values = (torch.randn(size, generator=generator) * spread).to(dtype)
    values[: size // 3] = 0
    expected_codes, expected_scales = cpu.quantize(values)
    codes, scales = (x.cpu() for x in quantize(values.to(device)))
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A value between two codes may fall to either where the quotients differ in the last bit.
    different = codes.float() != expected_codes.float()
    assert int(different.sum()) <= size // 1000
    back = dequantize(expected_codes.to(device), expected_scales.to(device), size, dtype)
    expected = cpu.dequantize(expected_codes, expected_scales, size, dtype)
    assert torch.equal(back.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter: infinity times zero
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad, device):
    values = torch.ones(300, device=device)
    values[200] = bad
    back = dequantize(*quantize(values), 300, torch.float32)
    assert not torch.isfinite(back[200])
    assert torch.equal(back[:128], values[:128])
    assert torch.equal(back[256:], values[256:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_behind_the_last_value(dtype, device):
    out = torch.full((1000,), 7.0, dtype=dtype, device=device)
    codes, scales = cpu.quantize(torch.ones(130))
    dequantize_kernel[(1,)](codes.to(device), scales.to(device), out, 130, 2, BG=32)
    assert torch.equal(out[:130], torch.ones(130, dtype=dtype, device=device))
    assert torch.equal(out[130:], torch.full((870,), 7.0, dtype=dtype, device=device))
