"""Triton kernels of FP8 blocks. N values, blocks of 128.

Bandwidth bound: 3.03 bytes a value of 16 bits either way, 6.4 us for 16,384 x 512 at 4.25 TB/s.
"""

import triton
import triton.language as tl

from k3_kernels.mx_quantize.kernel import larger


@triton.jit
def e4m3_rounded(x):
    """Values up to 448 as E4M3 holds them: multiples of 1/8 of the power of two below, which is at
    least 2^-6. In float32 these are the last bit beside 1.5 2^20 times that power."""
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    shift = power.to(tl.float32, bitcast=True) * 1572864.0
    return (x + shift) - shift


@triton.jit
def quantize_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    num_values,
    num_blocks,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BG: tl.constexpr,
):
    """BG blocks a program; codes of whole blocks, zero behind the last value. The scale of a block
    that is not finite is not either."""
    g = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=at < num_values, other=0.0).to(tl.float32)
    largest = larger(tl.reduce(tl.abs(x), 1, larger), SMALLEST)
    # Rounded here: the interpreter's cast does not round to nearest.
    codes = e4m3_rounded(x * (LARGEST / largest)[:, None]).to(tl.float8e4nv)
    tl.store(code_ptr + at, codes, mask=(g < num_blocks)[:, None])
    tl.store(scale_ptr + g, largest / LARGEST, mask=g < num_blocks)


@triton.jit
def dequantize_kernel(code_ptr, scale_ptr, out_ptr, num_values, num_blocks, BG: tl.constexpr):
    """BG blocks a program."""
    g = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = tl.load(scale_ptr + g, mask=g < num_blocks, other=0.0)
    codes = tl.load(code_ptr + at, mask=(g < num_blocks)[:, None], other=0.0)
    out = codes.to(tl.float32) * scale[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < num_values)
