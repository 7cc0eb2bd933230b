"""Top-k of sigmoid or softmax scores plus a bias (report 4, architecture 3.5).

A warp holds whole rows: lane g has the experts 4 g .. 4 g + 3 of every 128, so that the first pass
needs no exchange between lanes to find the best of each lane's group. Every choice then takes the
best group, reads its members again from cache, one a lane, and finds the best that is left: a
choice costs four reductions over a warp instead of E comparisons. Floor at 8192 x 896: 6.8 us for
the logits and as much for the scores. With few rows a choice does compare all keys: two reductions
and no cache to wait for.

Keys are order-preserving int32 images of the biased scores: NaN counts as -inf, and equal keys are
taken in order of the expert id, so the result is a function of the input alone. Whatever the
scores are, the ids are distinct and in 0..E-1.

In training a token whose cutoff is known adds its required biases to a histogram: one integer
atomic an expert, in the order of the rows' ends, which changes no count. They are 7.3 million at
8192 x 896 and the histogram (3.6 MB for 1000 bins) stays in the L2 cache, whose atomics bound this
part: about 45 us at one a cycle and slice, behind which the choices hide.

Legend: T tokens, E experts, k routes a token, B bins, G = 32 groups of J 4 experts.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs

LOWEST = tl.constexpr(-2147483648)


@triton.jit
def order_key(score):
    """int32 that sorts like the float32 score; above `LOWEST` for every score."""
    score = tl.where(score == score, score, -float("inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_score(key):
    """The score of an `order_key`, -inf for NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scores_of(logits, top, total, IS_SOFTMAX: tl.constexpr):
    if IS_SOFTMAX:
        return tl.exp(logits - top) / total
    return tl.sigmoid(logits)


@triton.jit
def best_of(key, expert, axis: tl.constexpr):
    """(largest key, its lowest expert) along an axis."""
    best = tl.max(key, axis=axis)
    is_best = key == tl.max(key, axis=axis, keep_dims=True)
    return best, tl.min(tl.where(is_best, expert, 2147483647), axis=axis)


@triton.jit
def add_required(histogram_ptr, scores, bias, cutoff, expert, is_in, is_counted, B: tl.constexpr):
    """Count cutoff - score of each expert in its bin, see `k3_core.ops.route_topk.histogram`."""
    low = tl.min(tl.where(is_in, bias, float("inf")))
    high = tl.max(tl.where(is_in, bias, -float("inf")))
    width = tl.div_rn(high - low + 2.0, B * 1.0)
    position = tl.div_rn(cutoff - scores - (low - 1.0), width)
    position = tl.where(position == position, position, 0.0)
    bins = tl.minimum(tl.maximum(position, 0.0), B - 1.0).to(tl.int32)
    tl.atomic_add(histogram_ptr + expert * B + bins, 1, mask=is_in & is_counted, sem="relaxed")


@triton.jit
def route_topk_kernel(
    logits_ptr,
    bias_ptr,
    idx_ptr,
    weight_ptr,
    scores_ptr,
    cutoff_ptr,
    histogram_ptr,
    is_counted_ptr,
    logits_stride,
    scaling_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    J: tl.constexpr,
    KPAD: tl.constexpr,
    B: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One token a program of one warp; K + 1 rounds, the last of which only gives the cutoff.

    B: bins of the histogram, 0 without one. IS_WHOLE: a round looks at all keys, which stay in
    registers, and waits for no memory.
    """
    t = tl.program_id(0).to(tl.int64)
    logits_at = logits_ptr + t * logits_stride
    # Groups are the first dimension: the layout of the load then gives each of them one lane.
    expert = 4 * tl.arange(0, 32)[:, None, None] + 128 * tl.arange(0, J)[None, :, None]
    expert += tl.arange(0, 4)[None, None, :]
    is_in = expert < E
    bias = tl.load(bias_ptr + expert, mask=is_in, other=0.0).to(tl.float32)
    wait_for_inputs(IS_EARLY)
    logits = tl.load(logits_at + expert, mask=is_in, other=-float("inf"))
    top = 0.0
    total = 0.0
    if IS_SOFTMAX:
        top = tl.max(logits)
        total = tl.sum(tl.where(is_in, tl.exp(logits - top), 0.0))
    scores = scores_of(logits, top, total, IS_SOFTMAX)
    tl.store(scores_ptr + t * E + expert, scores, mask=is_in)
    keys = tl.where(is_in, order_key(scores + bias), LOWEST)
    if not IS_WHOLE:
        best, best_id = best_of(*best_of(keys, expert, 2), 1)
    group = tl.arange(0, 32)
    member = tl.arange(0, J * 4)
    member = member // 4 * 128 + member % 4
    k = tl.arange(0, KPAD)
    idx = tl.zeros((KPAD,), tl.int32)
    cutoff = -float("inf")
    for i in range(K + 1 if K < E else K):
        if IS_WHOLE:
            last = tl.max(tl.max(tl.max(keys, 2), 1), 0)
            candidate = tl.where(keys == last, expert, 2147483647)
            chosen = tl.min(tl.min(tl.min(candidate, 2), 1), 0)
            keys = tl.where(expert == chosen, LOWEST, keys)
        else:
            last, chosen = best_of(best, best_id, 0)
            here = chosen // 4 % 32
            e = member + 4 * here
            is_open = e < E
            logit = tl.load(logits_at + e, mask=is_open, other=-float("inf"))
            score = scores_of(logit, top, total, IS_SOFTMAX)
            key = order_key(score + tl.load(bias_ptr + e, mask=is_open, other=0.0).to(tl.float32))
            # A group gives its members in falling order of (key, -id), as all of them are given.
            is_left = is_open & ((key < last) | ((key == last) & (e > chosen)))
            rest, rest_id = best_of(tl.where(is_left, key, LOWEST), e, 0)
            best = tl.where(group == here, rest, best)
            best_id = tl.where(group == here, rest_id, best_id)
        idx = tl.where(k == i, chosen, idx)
        if i == K:
            cutoff = order_score(last)

    is_route = k < K
    own = tl.load(logits_at + idx, mask=is_route, other=0.0)
    weights = scores_of(own, top, total, IS_SOFTMAX)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(is_route, weights, 0.0)) + 1e-20)
    tl.store(idx_ptr + t * K + k, idx.to(tl.int64), mask=is_route)
    tl.store(weight_ptr + t * K + k, weights * scaling_factor, mask=is_route)
    tl.store(cutoff_ptr + t, cutoff)
    if B > 0:
        # The scores again, from cache: kept, they would take registers of every round.
        logits = tl.load(logits_at + expert, mask=is_in, other=0.0)
        scores = scores_of(logits, top, total, IS_SOFTMAX)
        bias = tl.load(bias_ptr + expert, mask=is_in, other=0.0).to(tl.float32)
        is_counted = True
        if HAS_MASK:
            is_counted = tl.load(is_counted_ptr + t) != 0
        add_required(histogram_ptr, scores, bias, cutoff, expert, is_in, is_counted, B)
