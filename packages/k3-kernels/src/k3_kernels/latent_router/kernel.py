"""One product of the tokens with two weights that lie apart (report 4).

The weight tile is the left operand, [BN outputs x BK] times [BK x BM tokens]: with few tokens wgmma
gets its 64 rows from the outputs, and no zeros are multiplied but those of a ragged tile. Tensor
descriptors bring the tiles and fill what lies outside with zeros, so that nothing is masked before
the end. A block of outputs belongs to one of the two weights. Each has its own loop, of which one
makes no step: a choice inside a loop would not be pipelined, and loops in the two branches of a
condition may get stages of their own, twice the memory.

A float32 router is two 16-bit ones, its rounded values and what rounding left of them, whose
products go into the same float32 sums: within 2^-17 of its logits, at twice their products.

At 8192 x 7168 -> 3584 + 896: 526 GFLOP, 0.69 ms at 761 TFLOP/s. For few tokens 64 MB of weights,
15 us; the inner dimension is then split, so that 35 blocks of outputs reach every multiprocessor.

Legend: T tokens, D model width, L latent width, E experts, S splits of D.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.linear.kernel import wide_product


@triton.jit
def add_product(
    acc,
    weight,
    x,
    column,
    row,
    start,
    num_steps,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc [BN, BM] plus outputs from `column` of tokens from `row`: BK inputs a step."""
    for i in range(num_steps):
        d = start + i * BK
        acc = tl.dot(weight.load([column, d]), x.load([row, d]).T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_tile(out_ptr, acc, column, row, stride, num_rows, N, BN: tl.constexpr, BM: tl.constexpr):
    """Store [BN, BM] into rows of N outputs."""
    n = column + tl.arange(0, BN)
    t = row + tl.arange(0, BM)
    at = out_ptr + t[None, :].to(tl.int64) * stride + n[:, None]
    mask = (n < N)[:, None] & (t < num_rows)[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def latent_router_kernel(
    x,
    latent,
    router,
    rest,
    z_ptr,
    logits_ptr,
    num_tokens,
    z_stride,
    logits_stride,
    D: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    HAS_REST: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """x, latent, router: descriptors of [T, D], [L, D], [E, D]. Output s of a split is s T rows on.
    HAS_REST: `rest` [E, D] is added to the router.

    Grid: splits x tiles of tokens (rounded up to GROUP) x blocks of outputs; GROUP tiles of tokens
    are neighbours in time, so that they share a block of weights in the second-level cache.
    """
    wait_for_inputs(IS_EARLY)
    latent_blocks: tl.constexpr = (L + BN - 1) // BN
    num_blocks: tl.constexpr = latent_blocks + (E + BN - 1) // BN
    num_steps: tl.constexpr = (D + SPLITS * BK - 1) // (SPLITS * BK)
    split = tl.program_id(0) % SPLITS
    pid = tl.program_id(0) // SPLITS
    in_group = pid % (GROUP * num_blocks)
    row = (pid // (GROUP * num_blocks) * GROUP + in_group % GROUP) * BM
    if row >= num_tokens:
        return
    block = in_group // GROUP
    is_latent = block < latent_blocks
    column = (block if is_latent else block - latent_blocks) * BN
    start = split * num_steps * BK
    offset = split.to(tl.int64) * num_tokens
    latent_steps = num_steps if is_latent else 0
    acc = tl.zeros((BN, BM), tl.float32)
    acc = add_product(acc, latent, x, column, row, start, latent_steps, BK, PRECISION)
    router_steps = num_steps - latent_steps
    acc = add_product(acc, router, x, column, row, start, router_steps, BK, PRECISION)
    if HAS_REST:
        acc = add_product(acc, rest, x, column, row, start, router_steps, BK, PRECISION)
    if is_latent:
        z_at = z_ptr + offset * z_stride
        store_tile(z_at, acc, column, row, z_stride, num_tokens, L, BN, BM)
    else:
        logits_at = logits_ptr + offset * logits_stride
        store_tile(logits_at, acc, column, row, logits_stride, num_tokens, E, BN, BM)


@triton.jit
def few_rows_kernel(
    x,
    latent,
    router,
    z_ptr,
    logits_ptr,
    num_rows,
    L: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """x [T, D] times both weights, all inputs in one step as the `wide_kernel` of linear.

    Outputs contiguous. Grid: tiles of rows x (blocks of latents, then of experts).
    """
    num_tiles = tl.cdiv(num_rows, BM)
    latent_blocks: tl.constexpr = (L + BN - 1) // BN
    row = tl.program_id(0) % num_tiles * BM
    out = tl.program_id(0) // num_tiles * BN
    first: tl.constexpr = latent_blocks * BN
    if out < first:
        wide_product(x, latent, z_ptr, z_ptr, num_rows, 0, row, out,
                     L, BM, BN, False, PRECISION, IS_EARLY)  # fmt: skip
    else:
        wide_product(x, router, z_ptr, logits_ptr, num_rows, 0, row, out - first,
                     E, BM, BN, False, PRECISION, IS_EARLY)  # fmt: skip


@triton.jit
def add_splits_kernel(
    parts_ptr,
    z_ptr,
    logits_ptr,
    num_tokens,
    L: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """parts [S, T, L + E] in float32 -> z [T, L] and logits [T, E], in the order of the splits."""
    wait_for_inputs(IS_EARLY)
    num_blocks: tl.constexpr = (L + E + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // num_blocks).to(tl.int64)
    n = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        at = parts_ptr + (s * num_tokens + t) * (L + E) + n
        total += tl.load(at, mask=n < L + E, other=0.0)
    tl.store(z_ptr + t * L + n, total.to(z_ptr.dtype.element_ty), mask=n < L)
    tl.store(logits_ptr + t * E + n - L, total, mask=(n >= L) & (n < L + E))
