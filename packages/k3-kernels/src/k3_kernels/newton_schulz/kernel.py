"""Products A A^T and b G + c G G of symmetric results: blocks below the diagonal alone (report 5).

Blocks of rows are BM and of columns BN = R BM. The R tiles of a square on the diagonal are stored
as they are, those below also mirrored; of [3072 x 3072] by 128 x 256 that is 156 of 288 tiles.

112 x [3072 x 3584], 5 steps: two such products are 36 and 31 of 68 and 58 GFLOP a matrix and step,
the third, with X, 68 by torch: 75 TFLOP in all instead of 108, 99 ms at 761 TFLOP/s, 120 to 130 ms
at the clocks that so long a run leaves.

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
    num_steps,
    tiles,
    a,
    b,
    c,
    HAS_POLYNOMIAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left, right: descriptors of one stack [N m, k], in tiles of BM and BN rows; out [N, m, m].

    out = A A^T, or s (a I + b s^2 G + c s^4 A A^T) with G at gram_ptr and s of the matrix at
    scale_ptr. Grid: matrices x tiles.
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
    for i in range(num_steps):
        x = left.load([first + row, i * BK])
        y = right.load([first + column, i * BK])
        acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
    r = row + tl.arange(0, BM)[:, None]
    n = column + tl.arange(0, BN)[None, :]
    mask = (r < num_rows) & (n < num_rows)
    start = matrix.to(tl.int64) * num_rows * num_rows
    if HAS_POLYNOMIAL:
        gram = tl.load(gram_ptr + start + r * num_rows + n, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + matrix) if HAS_SCALE else 1.0
        square_scale = scale * scale
        acc = gram * (b * square_scale) + acc * (c * square_scale * square_scale)
        acc = scale * tl.where(r == n, acc + a, acc)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + r * num_rows + n, out, mask=mask)
    if block < square:
        mirrored = tl.trans(n) * num_rows + tl.trans(r)
        tl.store(out_ptr + start + mirrored, tl.trans(out), mask=tl.trans(mask))
