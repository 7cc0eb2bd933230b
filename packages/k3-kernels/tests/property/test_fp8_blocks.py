"""FP8 blocks: what a value can be off by, for values of any size (report 7.2)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_kernels.fp8_blocks.cpu import BLOCK, dequantize, quantize

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(st.integers(1, 700), DTYPES, st.integers(0, 2**31), st.floats(-30, 4))
def test_a_value_is_off_by_a_16th_of_itself_or_little_of_its_block(size, dtype, seed, power):
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.empty(size).uniform_(-6, 0, generator=generator)
    values = (torch.randn(size, generator=generator) * spread * 10**power).to(dtype)
    codes, scales = quantize(values)
    assert codes.dtype == torch.float8_e4m3fn
    assert len(codes) == len(scales) * BLOCK
    back = dequantize(codes, scales, size, dtype)
    assert back.dtype == dtype
    exact, got = values.double(), back.double()
    # Half a unit: of 3 bits of mantissa, or of 2^-9, the spacing of E4M3 below its normal numbers.
    smallest = scales.double().repeat_interleave(BLOCK)[:size] * 2**-10
    own = torch.finfo(dtype)
    bound = torch.maximum(exact.abs() / 16, smallest) * 1.001 + own.eps * exact.abs() + own.tiny
    assert bool(((got - exact).abs() <= bound).all())


@given(st.lists(st.sampled_from([0.0, float("inf"), float("nan"), 1.0]), min_size=1, max_size=300))
def test_zeros_stay_and_what_is_not_finite_stays_so(values):
    values = torch.tensor(values)
    back = dequantize(*quantize(values), len(values), torch.float32)
    assert bool((back[values == 0].nan_to_num() == 0).all())
    assert not torch.isfinite(back[~torch.isfinite(values)]).any()
