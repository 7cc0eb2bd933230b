"""MXFP4 in compiled loops: 32 codes with one scale at a time, in vector units.

A code has a sign, two bits of exponent and one of mantissa (E2M1). Processors that widen float16 do
that here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from k3_core.quant.mx import BLOCK
from k3_kernels.loops import compiled_in_order, vector

_FACTORS = np.array([*(2.0 ** (byte - 127) for byte in range(255)), np.nan])
_I16, _I32 = ir.IntType(16), ir.IntType(32)


@compiled_in_order
def decode(codes: int, scales: int, num_groups: int, values: int, dtype: Any) -> None:
    """Groups of 16 bytes at address `codes`, a scale byte each, into numbers at `values`.

    In order, since 2^14 times a large scale is no float32.
    """
    scale_G = vector(scales, num_groups, np.uint8)
    size = np.empty(0, dtype).itemsize * BLOCK
    for g in range(num_groups):
        factor = np.float64(_FACTORS[scale_G[g]])
        _decode_group(codes + g * BLOCK // 2, factor, values + g * size, dtype)


def _typed_decode_group(
    _context: Any, codes: Any, factor: Any, values: Any, dtype: Any
) -> tuple[Any, Any]:
    """The first value of a byte is in its low half."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = context.get_value_type(dtype.dtype)
        words_8 = builder.load(_at(builder, arguments[0], _I16, BLOCK // 4), align=1)
        places_G = _each(_I32, *(n // 4 for n in range(BLOCK)))
        words_G = builder.shuffle_vector(words_8, words_8, places_G)
        shifts_G = _each(_I16, *(1 << (12 - 4 * (n % 4)) for n in range(BLOCK)))
        leading_G = builder.mul(words_G, shifts_G)
        _triple, _name, features = context.codegen().magic_tuple()
        widen = _by_float16 if "+f16c" in features else _by_integers
        values_G = widen(builder, leading_G, ir.VectorType(number, BLOCK))
        scale = arguments[1]
        if dtype.dtype == types.float32:
            scale = builder.fptrunc(scale, number)
        nothing_G = ir.Constant(values_G.type, ir.Undefined)
        first_G = builder.insert_element(nothing_G, scale, _I32(0))
        scale_G = builder.shuffle_vector(first_G, first_G, _each(_I32, 0))
        target = _at(builder, arguments[2], number, BLOCK)
        builder.store(builder.fmul(values_G, scale_G), target, align=4)
        return context.get_dummy_value()

    return types.void(codes, factor, values, dtype), generate


def _by_float16(builder: Any, leading_G: Any, kind: Any) -> Any:
    """Moved to where float16 has sign, exponent and mantissa, a code is its value over 2^14."""
    # The shift copies the sign into the upper bits of the exponent, where 0 belongs.
    moved_G = builder.ashr(leading_G, _each(_I16, 3))
    bits_G = builder.and_(moved_G, _each(_I16, -(1 << 15) | 7 << 9))
    halves_G = builder.bitcast(bits_G, ir.VectorType(ir.HalfType(), BLOCK))
    return builder.fmul(builder.fpext(halves_G, kind), _each(kind.element, 2.0**14))


def _by_integers(builder: Any, leading_G: Any, kind: Any) -> Any:
    """Codes count twice the values, 0 1 2 3 4 6 8 12: by 1, from 4 on by 2, from 6 on by 4."""
    code_G = builder.and_(builder.lshr(leading_G, _each(_I16, 12)), _each(_I16, 7))
    second_G = builder.sub(builder.add(code_G, code_G), _each(_I16, 4))
    third_G = builder.sub(builder.add(second_G, second_G), _each(_I16, 8))
    double_G = _larger(builder, _larger(builder, code_G, second_G), third_G)
    is_negative_G = builder.icmp_signed("<", leading_G, _each(_I16, 0))
    signed_G = builder.select(is_negative_G, builder.neg(double_G), double_G)
    return builder.fmul(builder.sitofp(signed_G, kind), _each(kind.element, 0.5))


_decode_group: Any = intrinsic(_typed_decode_group)


def _at(builder: Any, address: Any, kind: Any, length: int) -> Any:
    """The address as that of a vector."""
    return builder.inttoptr(address, ir.VectorType(kind, length).as_pointer())


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _each(kind: Any, *values: Any) -> Any:
    """A constant with a number for each value of a group, or the same for all."""
    numbers = list(values) if len(values) > 1 else list(values) * BLOCK
    return ir.Constant(ir.VectorType(kind, BLOCK), numbers)
