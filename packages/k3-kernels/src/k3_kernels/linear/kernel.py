"""Products of few rows with a weight: a program holds all inputs of its outputs at once.

Small weights are read faster than a kernel starts, so nothing is pipelined: a program asks for its
whole block of weights before it waits for the kernel in front of it (`early`), then for its rows,
and multiplies once. With 64 outputs the weights are the left operand of a wgmma, and descriptors
bring both operands straight into shared memory: through registers the compiler has a few loads
under way at a time, so that 64 x 512 values take ten times the way to memory. Fewer outputs, which
make more programs, are too few for a wgmma; there the inputs are cut into a part for each warp, and
the parts are added in order.

Legend: T rows, K inputs, N outputs.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs


@triton.jit
def whole_operands(
    x_ptr,
    weight_ptr,
    num_rows,
    num_out,
    x_stride,
    weight_stride,
    first_row,
    first_out,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """All inputs of BM rows and of BN outputs, in PARTS; waits for the rows, not the weights."""
    row = first_row + tl.arange(0, BM)[None, :, None]
    out = first_out + tl.arange(0, BN)[None, :, None]
    k = tl.arange(0, PARTS)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
    weight_at = weight_ptr + out.to(tl.int64) * weight_stride + k
    weight = tl.load(weight_at, mask=(out < num_out) & (k < K), other=0.0)
    wait_for_inputs(IS_EARLY)
    x_at = x_ptr + row.to(tl.int64) * x_stride + k
    x = tl.load(x_at, mask=(row < num_rows) & (k < K), other=0.0)
    return x, weight


@triton.jit
def whole_product(x, weight, PRECISION: tl.constexpr):
    """The float32 products [BM, BN] of `whole_operands`."""
    return tl.sum(tl.dot(x, weight.permute(0, 2, 1), input_precision=PRECISION), 0)


@triton.jit
def narrow_kernel(
    x_ptr,
    weight_ptr,
    added_ptr,
    y_ptr,
    num_rows,
    x_stride,
    weight_stride,
    added_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """y [T, N] = x [T, K] weight [N, K]^T, plus `added`, in rows added_stride apart.

    PARTS x BK inputs hold all K. Grid: tiles of rows x blocks of outputs, rows first, so that
    neighbours share the weights.
    """
    num_tiles = tl.cdiv(num_rows, BM)
    pid = tl.program_id(0)
    first_row = pid % num_tiles * BM
    first_out = pid // num_tiles * BN
    x, weight = whole_operands(
        x_ptr,
        weight_ptr,
        num_rows,
        N,
        x_stride,
        weight_stride,
        first_row,
        first_out,
        K,
        PARTS,
        BM,
        BN,
        BK,
        IS_EARLY,
    )
    row = (first_row + tl.arange(0, BM)[:, None]).to(tl.int64)
    out = first_out + tl.arange(0, BN)[None, :]
    mask = (row < num_rows) & (out < N)
    if HAS_ADDED:
        # Asked for together with x.
        added_at = added_ptr + row * added_stride + out
        added = tl.load(added_at, mask=mask, other=0.0).to(tl.float32)
    y = whole_product(x, weight, PRECISION)
    if HAS_ADDED:
        y += added
    tl.store(y_ptr + row * N + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def wide_product(
    x,
    weight,
    added_ptr,
    y_ptr,
    num_rows,
    added_stride,
    first_row,
    first_out,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Rows and outputs of one program, for descriptors whose blocks have all inputs."""
    weights = weight.load([first_out, 0])
    wait_for_inputs(IS_EARLY)
    row = (first_row + tl.arange(0, BM)[None, :]).to(tl.int64)
    out = first_out + tl.arange(0, BN)[:, None]
    mask = (row < num_rows) & (out < N)
    if HAS_ADDED:
        # Asked for before x, for which the program stops.
        added_at = added_ptr + row * added_stride + out
        added = tl.load(added_at, mask=mask, other=0.0).to(tl.float32)
    y = tl.dot(weights, x.load([first_row, 0]).T, input_precision=PRECISION)
    if HAS_ADDED:
        y += added
    tl.store(y_ptr + row * N + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def wide_kernel(
    x,
    weight,
    added_ptr,
    y_ptr,
    num_rows,
    added_stride,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """`narrow_kernel` for descriptors of x and weight."""
    num_tiles = tl.cdiv(num_rows, BM)
    first_row = tl.program_id(0) % num_tiles * BM
    first_out = tl.program_id(0) // num_tiles * BN
    wide_product(
        x,
        weight,
        added_ptr,
        y_ptr,
        num_rows,
        added_stride,
        first_row,
        first_out,
        N,
        BM,
        BN,
        HAS_ADDED,
        PRECISION,
        IS_EARLY,
    )
