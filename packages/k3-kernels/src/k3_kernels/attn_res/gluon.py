"""Backward of the mix on a Hopper GPU in Gluon: a token's rows wait in shared memory.

The terms are those of backward_kernel.py. The ring holds the rows of a token, which are read there
two or three times, and those of the next tokens behind them, so that each row comes once from
memory: a thread copies asynchronously the values that it will use itself, and refills a row's place
as soon as its gradient is out. A row is taken in pieces of 1024 values, so that no lane is idle
where the width is no power of two. The dots of all sources come before the first gradient; their
mean is then sum w_i (dmix . v_i), and without an output norm nothing needs the mix.

Floor: 19 rows for 9 sources of 8192 x 7168 bfloat16, 2.23 GB, 525 us at 4.25 TB/s. Ahead of a token
are 6 rows, 86 KB. A token takes 3 100 instructions of a warp, 4 100 with an output norm: 6 200 and
8 200 cycles of the 14 800 that its bytes take. Predicted 640 us.
Not interpretable: import it only where it runs.

Legend: T tokens, D model width, n sources, P programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def append(items, x):
    return items + (x,)  # noqa: RUF005  Triton unpacks no tuples.


@gluon.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def copy_row(ring, row_ptr, token, slot, d, D: gl.constexpr, PIECE: gl.constexpr):
    """Row `token` on its way to its place in the ring, as one group of copies."""
    start = row_ptr + token.to(gl.int64) * D
    for p in gl.static_range(D // PIECE):
        async_copy.async_copy_global_to_shared(ring[p].index(slot), start + p * PIECE + d)
    async_copy.commit_group()


@gluon.jit
def read(ring, slot, p: gl.constexpr, LAYOUT: gl.constexpr):
    """Piece `p` of the row in `slot`."""
    return ring[p].index(slot).load(LAYOUT).to(gl.float32)


@gluon.jit
def dots_of_three(
    ring, base, d_mix, first: gl.constexpr,
    NUM_SOURCES: gl.constexpr, SLOTS: gl.constexpr, NP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """d_mix . v_i of three sources from `first` on, in one reduction; the last one for others."""
    a = (base + 1 + first) % SLOTS
    b = (base + 1 + min(first + 1, NUM_SOURCES - 1)) % SLOTS
    c = (base + 1 + min(first + 2, NUM_SOURCES - 1)) % SLOTS
    in_a = d_mix[0] * read(ring, a, 0, LAYOUT)
    in_b = d_mix[0] * read(ring, b, 0, LAYOUT)
    in_c = d_mix[0] * read(ring, c, 0, LAYOUT)
    for p in gl.static_range(1, NP):
        in_a += d_mix[p] * read(ring, a, p, LAYOUT)
        in_b += d_mix[p] * read(ring, b, p, LAYOUT)
        in_c += d_mix[p] * read(ring, c, p, LAYOUT)
    return gl.reduce((in_a, in_b, in_c), 0, add_triples)


@gluon.jit
def norm_backward(d_out, mix, out_norm, d_out_norm, eps, D: gl.constexpr, NP: gl.constexpr):
    """(d_mix, d_out_norm) through out_norm * mix / sqrt(mean(mix^2) + eps), by pieces."""
    dot = d_out[0] * out_norm[0] * mix[0]
    square = mix[0] * mix[0]
    for p in gl.static_range(1, NP):
        dot += d_out[p] * out_norm[p] * mix[p]
        square += mix[p] * mix[p]
    dot, square = gl.reduce((dot, square), 0, add_pairs)
    r = gl.rsqrt(square / D + eps)
    d_mix, total = (), ()
    for p in gl.static_range(NP):
        d_mix = append(d_mix, r * (d_out[p] * out_norm[p] - mix[p] * (dot * r * r / D)))
        total = append(total, d_out_norm[p] + d_out[p] * mix[p] * r)
    return d_mix, total


@gluon.jit
def mix_backward_kernel(
    row_ptrs, d_value_ptrs, saved_ptr, norm_ptr, proj_ptr, out_norm_ptr, d_query_ptr,
    d_out_norm_ptr, num_tokens, num_programs, needed, out_eps,
    D: gl.constexpr, NUM_SOURCES: gl.constexpr, HAS_SUM: gl.constexpr, HAS_NORM: gl.constexpr,
    NEEDS_QUERY: gl.constexpr, SLOTS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """As the Triton kernel; rows of a token in the ring: d_out, the sources, d_sum. P programs."""
    NP: gl.constexpr = D // PIECE
    ROWS: gl.constexpr = NUM_SOURCES + 1 + HAS_SUM
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([PIECE // (32 * WARPS)], [32], [WARPS], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = row_ptrs[0].dtype.element_ty
    # A buffer for each piece: copies to different buffers need no barrier between them.
    ring = ()
    for _ in gl.static_range(NP):
        ring = append(ring, gl.allocate_shared_memory(dtype, [SLOTS, PIECE], PLAIN))
    pid = gl.program_id(0)
    d = gl.arange(0, PIECE, layout=LAYOUT)
    in_order = (row_ptrs[0],)
    for i in gl.static_range(NUM_SOURCES):
        in_order = append(in_order, row_ptrs[i + 2])
    if HAS_SUM:
        in_order = append(in_order, row_ptrs[1])
    last = num_tokens - 1
    for r in gl.static_range(SLOTS):
        ahead = gl.minimum(pid + r // ROWS * num_programs, last)
        copy_row(ring, in_order[r % ROWS], ahead, r, d, D, PIECE)
    query, d_query, d_out_norm, out_norm = (), (), (), ()
    for p in gl.static_range(NP):
        own = gl.load(norm_ptr + p * PIECE + d).to(gl.float32)
        query = append(query, own * gl.load(proj_ptr + p * PIECE + d).to(gl.float32))
        d_query = append(d_query, gl.zeros((PIECE,), gl.float32, LAYOUT))
        if HAS_NORM:
            out_norm = append(out_norm, gl.load(out_norm_ptr + p * PIECE + d))
            d_out_norm = append(d_out_norm, gl.zeros((PIECE,), gl.float32, LAYOUT))

    for step in range(gl.cdiv(num_tokens - pid, num_programs)):
        token = pid + step * num_programs
        base = step * ROWS
        saved_at = saved_ptr + token.to(gl.int64) * (2 * NUM_SOURCES + 1)
        lse = gl.load(saved_at + 2 * NUM_SOURCES)
        scores, scales, weights = (), (), ()
        for i in gl.static_range(NUM_SOURCES):
            scores = append(scores, gl.load(saved_at + i))
            scales = append(scales, gl.load(saved_at + NUM_SOURCES + i))
        for i in gl.static_range(NUM_SOURCES):
            weights = append(weights, gl.exp2((scores[i] - lse) * LOG2_E))

        # Of the rows on their way, so many come after the one that is waited for.
        async_copy.wait_group(SLOTS - 1)
        d_mix = ()
        for p in gl.static_range(NP):
            d_mix = append(d_mix, read(ring, base % SLOTS, p, LAYOUT))
        ahead = gl.minimum(token + SLOTS // ROWS * num_programs, last)
        copy_row(ring, in_order[SLOTS % ROWS], ahead, base % SLOTS, d, D, PIECE)
        if HAS_NORM:
            mix = ()
            for _ in gl.static_range(NP):
                mix = append(mix, gl.zeros((PIECE,), gl.float32, LAYOUT))
            for i in gl.static_range(NUM_SOURCES):
                async_copy.wait_group(SLOTS - 1 - i)
                total = ()
                for p in gl.static_range(NP):
                    value = read(ring, (base + 1 + i) % SLOTS, p, LAYOUT)
                    total = append(total, mix[p] + weights[i] * value)
                mix = total
            wide = ()
            for p in gl.static_range(NP):
                wide = append(wide, out_norm[p].to(gl.float32))
            d_mix, d_out_norm = norm_backward(d_mix, mix, wide, d_out_norm, out_eps, D, NP)
        dots = ()
        for i in gl.static_range(0, NUM_SOURCES, 3):
            async_copy.wait_group(SLOTS - 1 - min(i + 2, NUM_SOURCES - 1))
            dots = dots + dots_of_three(ring, base, d_mix, i, NUM_SOURCES, SLOTS, NP, LAYOUT)
        mean = 0.0
        for i in gl.static_range(NUM_SOURCES):
            mean += weights[i] * dots[i]
        if HAS_SUM:
            async_copy.wait_group(SLOTS - 1 - NUM_SOURCES)

        for i in gl.static_range(NUM_SOURCES):
            slot = (base + 1 + i) % SLOTS
            along = 0.0
            if NUM_SOURCES > 1:
                along = weights[i] * (dots[i] - mean) * scales[i]
            shrink = along * scores[i] * scales[i] / -D
            d_value, total = (), ()
            for p in gl.static_range(NP):
                value = read(ring, slot, p, LAYOUT)
                own = weights[i] * d_mix[p] + along * query[p] + shrink * value
                if HAS_SUM and i == NUM_SOURCES - 1:
                    own += read(ring, (base + ROWS - 1) % SLOTS, p, LAYOUT)
                d_value = append(d_value, own.to(dtype))
                total = append(total, d_query[p] + along * value)
            d_query = total
            if (needed >> i) & 1 == 1:
                to = d_value_ptrs[i] + token.to(gl.int64) * D
                for p in gl.static_range(NP):
                    gl.store(to + p * PIECE + d, d_value[p], eviction_policy="evict_first")
            ahead = gl.minimum(token + (SLOTS + 1 + i) // ROWS * num_programs, last)
            copy_row(ring, in_order[(SLOTS + 1 + i) % ROWS], ahead, slot, d, D, PIECE)
        if HAS_SUM:
            ahead = gl.minimum(token + (SLOTS + ROWS - 1) // ROWS * num_programs, last)
            slot = (base + ROWS - 1) % SLOTS
            copy_row(ring, in_order[(SLOTS + ROWS - 1) % ROWS], ahead, slot, d, D, PIECE)
    async_copy.wait_group(0)
    at = pid.to(gl.int64) * D + d
    for p in gl.static_range(NP):
        if NEEDS_QUERY:
            gl.store(d_query_ptr + at + p * PIECE, d_query[p])
        if HAS_NORM:
            gl.store(d_out_norm_ptr + at + p * PIECE, d_out_norm[p])
