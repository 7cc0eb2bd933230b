"""Products A B and s (aI + b s^2 G + c s^4 GG) of symmetric results: half of their blocks.

Blocks of rows are BM and of columns BN = R BM. The R tiles of a square on the diagonal are stored
as they are, those below also mirrored; of [3072 x 3072] by 128 x 256 that is 156 of 288 tiles.

112 x [3072 x 3584], 5 steps: two such products are 36 and 31 of 68 and 58 GFLOP a matrix and step,
the third, with X, 68 by torch: 75 TFLOP in all instead of 108, 99 ms at 761 TFLOP/s, 120 to 130 ms
at the clocks that so long a run leaves.

A pair is a float32 matrix as two of bfloat16, its high and low bits [m, 2, W] side by side, with
W >= m a multiple of BK and zeros from m on. A product of pairs is high high + high low + low high.

Legend: m rows of a matrix, k its columns.
"""

import triton
import triton.language as tl


@triton.jit
def triangle(t):
    """(p, q) with q <= p: the t-th pair in rows of 1, 2, 3, ... pairs."""
    p = ((tl.sqrt((8 * t + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded.
    p += ((p + 1) * (p + 2) // 2 <= t).to(tl.int32)
    p -= (p * (p + 1) // 2 > t).to(tl.int32)
    return p, t - p * (p + 1) // 2


@triton.jit
def symmetric_kernel(
    left,
    right,
    gram_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    row_stride,
    num_steps,
    tiles,
    a,
    b,
    c,
    HAS_POLYNOMIAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_PAIR: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left, right: descriptors [N m, k] in tiles of BM and BN rows, of pairs [N m, 2 W].

    out: left right^T, or s (aI + b s^2 G + c s^4 left right^T) with G at gram_ptr, which has the
    strides of out, and s of the matrix at scale_ptr. num_steps: over k, or over W. Grid: matrices x
    tiles.
    """
    R: tl.constexpr = BN // BM
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    square, block = triangle(tile // R)
    row = (square * R + tile % R) * BM
    column = block * BN
    if row >= num_rows:
        return
    first = matrix * num_rows
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(3 * num_steps if IS_PAIR else num_steps):
        x_at = i * BK
        y_at = x_at
        if IS_PAIR:
            # Columns of high, high, low on the left, of high, low, high on the right.
            x_at -= tl.where(i >= num_steps, num_steps * BK, 0)
            y_at -= tl.where(i >= 2 * num_steps, 2 * num_steps * BK, 0)
        x = left.load([first + row, x_at])
        y = right.load([first + column, y_at])
        acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
    r = row + tl.arange(0, BM)[:, None]
    n = column + tl.arange(0, BN)[None, :]
    mask = (r < num_rows) & (n < num_rows)
    start = matrix.to(tl.int64) * num_rows * row_stride
    out_ptr += start
    at = r * row_stride + n
    low = num_steps * BK
    if HAS_POLYNOMIAL:
        gram_ptr += start
        gram = tl.load(gram_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if IS_PAIR:
            gram += tl.load(gram_ptr + at + low, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + matrix) if HAS_SCALE else 1.0
        square_scale = scale * scale
        acc = gram * (b * square_scale) + acc * (c * square_scale * square_scale)
        acc = scale * tl.where(r == n, acc + a, acc)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = acc.to(dtype)
    rest = (acc - out.to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, out, mask=mask)
    if IS_PAIR:
        tl.store(out_ptr + at + low, rest, mask=mask)
    if block < square:
        mirrored = tl.trans(n) * row_stride + tl.trans(r)
        is_inside = tl.trans(mask)
        tl.store(out_ptr + mirrored, tl.trans(out), mask=is_inside)
        if IS_PAIR:
            tl.store(out_ptr + mirrored + low, tl.trans(rest), mask=is_inside)
