"""MXFP4 and MXFP8 codes with E8M0 scales, by integer arithmetic on float32 bits (report 8.7).

Multiplication by a power of two is exact, and rounding to nearest, ties to even, is an addition
below the last kept bit: the results equal the float64 reference bit for bit. Bandwidth bound.
"""

import triton
import triton.language as tl

NAN_SCALE = tl.constexpr(255)


@triton.jit
def exponent_field(x):
    """Biased exponent of non-negative float32 values; 0 for zero and subnormals, 255 for NaN."""
    return (x.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def round_bits(x, DROP: tl.constexpr):
    """Bits of x >= 0 without the last DROP, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP


@triton.jit
def times_power(x, byte):
    """x * 2^(127 - byte) for bytes 0..253: x in units of its block's scale."""
    return x * ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """The larger of two, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def e2m1_code(x):
    """Nearest E2M1 code of a value in units of the scale; above 6 it saturates.

    Codes are multiples of half the power of two below a value, at least of 0.5. Adding 2^22 times
    that power rounds to them, ties to even, and leaves the multiple in the last bits.
    """
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    rounded = tl.abs(x) + power.to(tl.float32, bitcast=True) * 4194304.0
    multiple = rounded.to(tl.int32, bitcast=True) & 7
    code = tl.minimum(multiple + (power >> 22) - 254, 7)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e4m3_code(x):
    """Nearest E4M3 code of a value in units of the scale; above 448 it saturates."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    normal = round_bits(magnitude, 20) - 960
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def mx_rounded(x, IS_FP4: tl.constexpr):
    """float32 blocks [B, G, 32] as MXFP4 or MXFP8 holds them; NaN where a value is not finite.

    The values kept are multiples of 2^-1 or 2^-3 of the power of two below them, which is at least
    1 or 2^-6: adding 2^22 or 2^20 times that power and taking it away rounds to them.
    """
    LIMIT: tl.constexpr = 6.0 if IS_FP4 else 448.0
    FIRST: tl.constexpr = 2 if IS_FP4 else 8
    SMALLEST: tl.constexpr = 0x3F800000 if IS_FP4 else 0x3C800000
    SHIFT: tl.constexpr = 4194304.0 if IS_FP4 else 1048576.0
    largest = tl.reduce(tl.abs(x), 2, larger)
    byte = tl.maximum(exponent_field(largest) - FIRST, 0)
    scale = tl.maximum(byte << 23, 0x400000).to(tl.float32, bitcast=True)
    # What is not finite becomes NaN by the subtraction.
    scale += largest - largest
    size = tl.abs(times_power(x, byte[:, :, None]))
    power = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, SMALLEST)
    shift = power.to(tl.float32, bitcast=True) * SHIFT
    size = tl.minimum((size + shift) - shift, LIMIT) * scale[:, :, None]
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def mx_fake_kernel(x_ptr, out_ptr, num_blocks, IS_FP4: tl.constexpr, BG: tl.constexpr):
    """BG blocks of 32 values, rounded in place of codes and scales."""
    g = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    is_block = (g < num_blocks)[:, None]
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=is_block, other=0.0).to(tl.float32)
    out = mx_rounded(x.reshape((BG, 1, 32)), IS_FP4).reshape((BG, 32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_block)


@triton.jit
def mxfp4_kernel(w_ptr, packed_ptr, scale_ptr, num_blocks, LARGEST: tl.constexpr, BG: tl.constexpr):
    """BG blocks of 32 values: scale by the floor rule; 255 marks values that cannot be coded."""
    g = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    is_block = (g < num_blocks)[:, None]
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    w = tl.load(w_ptr + at, mask=is_block, other=0.0).to(tl.float32)
    largest = tl.reduce(tl.abs(w), 1, larger)
    byte = tl.minimum(tl.maximum(exponent_field(largest) - 2, 0), 253)
    code = e2m1_code(times_power(w, byte[:, None]))
    low, high = tl.split(code.reshape((BG, 16, 2)))
    packed_at = packed_ptr + g[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed_at, (low | (high << 4)).to(tl.uint8), mask=is_block)
    byte = tl.where(largest <= LARGEST, byte, NAN_SCALE)
    tl.store(scale_ptr + g, byte.to(tl.uint8), mask=g < num_blocks)


@triton.jit
def mxfp8_kernel(w_ptr, code_ptr, scale_ptr, num_blocks, IS_CEIL: tl.constexpr, BG: tl.constexpr):
    """BG blocks of 32 values; the scale's exponent is floor or ceiling of log2(largest / 448)."""
    g = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    is_block = (g < num_blocks)[:, None]
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    w = tl.load(w_ptr + at, mask=is_block, other=0.0).to(tl.float32)
    largest = tl.reduce(tl.abs(w), 1, larger)
    is_bad = (largest < float("inf")) == 0
    byte = exponent_field(largest) - 8
    if IS_CEIL:
        # 448 = 1.75 * 2^8: a mantissa above 1.75 needs the next power of two.
        mantissa = largest.to(tl.int32, bitcast=True) & 0x7FFFFF
        byte += (mantissa > 0x600000).to(tl.int32)
    byte = tl.maximum(byte, 0)
    code = e4m3_code(times_power(w, byte[:, None]))
    tl.store(code_ptr + at, tl.where(is_bad[:, None], 127, code).to(tl.uint8), mask=is_block)
    byte = tl.where(is_bad, NAN_SCALE, byte)
    tl.store(scale_ptr + g, byte.to(tl.uint8), mask=g < num_blocks)
