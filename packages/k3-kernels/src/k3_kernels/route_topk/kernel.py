"""Top-k of sigmoid or softmax scores plus a bias (report 4, architecture 3.5).

One full read of a row leaves the best key of each group of GS experts; every choice then takes
the best group, reads that group again (from cache) and finds its best remaining expert, so that
a choice costs G + GS comparisons instead of E. Floor at 8192 x 896: 6.8 us for the logits and as
much for the scores. Keys are order-preserving int32 images of the biased scores: NaN counts as
-inf, and equal keys are taken in order of the expert id, so the result is a function of the
input alone. Whatever the scores are, the ids are distinct and in 0..E-1.

Legend: T tokens, E experts, k routes a token, G groups of GS experts.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2147483648)


@triton.jit
def order_key(score):
    """int32 that sorts like the float32 score; above `LOWEST` for every score."""
    score = tl.where(score == score, score, -float("inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scores_of(logits, top, total, IS_SOFTMAX: tl.constexpr):
    if IS_SOFTMAX:
        return tl.exp(logits - top) / total
    return tl.sigmoid(logits)


@triton.jit
def route_topk_kernel(
    logits_ptr,
    bias_ptr,
    idx_ptr,
    weight_ptr,
    scores_ptr,
    cutoff_ptr,
    num_tokens,
    logits_stride,
    scaling_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    G: tl.constexpr,
    GS: tl.constexpr,
    KPAD: tl.constexpr,
    BT: tl.constexpr,
):
    """BT tokens a program; K + 1 rounds, the last of which only gives the cutoff."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_token = t < num_tokens
    group = tl.arange(0, G)
    member = tl.arange(0, GS)
    expert = group[:, None] * GS + member[None, :]
    is_in = is_token[:, None, None] & (expert < E)[None, :, :]
    at = logits_ptr + t[:, None, None] * logits_stride + expert[None, :, :]
    logits = tl.load(at, mask=is_in, other=-float("inf")).to(tl.float32)
    top = tl.zeros((BT,), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    if IS_SOFTMAX:
        top = tl.max(tl.max(logits, axis=2), axis=1)
        each = tl.exp(logits - top[:, None, None])
        total = tl.sum(tl.sum(tl.where(is_in, each, 0.0), axis=2), axis=1)
    scores = scores_of(logits, top[:, None, None], total[:, None, None], IS_SOFTMAX)
    scores_at = scores_ptr + t[:, None, None] * E + expert[None, :, :]
    tl.store(scores_at, scores, mask=is_in)
    bias = tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    keys = tl.where(is_in, order_key(scores + bias[None, :, :]), LOWEST)
    best = tl.max(keys, axis=2)

    k = tl.arange(0, KPAD)
    idx = tl.zeros((BT, KPAD), tl.int32)
    weights = tl.zeros((BT, KPAD), tl.float32)
    cutoff = tl.full((BT,), -float("inf"), tl.float32)
    last_key = tl.full((BT,), 2147483647, tl.int32)
    last_id = tl.full((BT,), -1, tl.int32)
    for i in range(K + 1 if K < E else K):
        # The lowest group among equals, because ids grow with the group.
        best_key = tl.max(best, axis=1)
        here = tl.min(tl.where(best == best_key[:, None], group[None, :], G - 1), axis=1)
        e = here[:, None] * GS + member[None, :]
        is_open = is_token[:, None] & (e < E)
        logits_at = logits_ptr + t[:, None] * logits_stride + e
        logit = tl.load(logits_at, mask=is_open, other=-float("inf")).to(tl.float32)
        score = scores_of(logit, top[:, None], total[:, None], IS_SOFTMAX)
        biased = score + tl.load(bias_ptr + e, mask=is_open, other=0.0).to(tl.float32)
        key = order_key(biased)
        # Choices come in falling order of (key, -id): what is not below the last one is taken.
        is_left = (key < last_key[:, None]) | ((key == last_key[:, None]) & (e > last_id[:, None]))
        key = tl.where(is_open & is_left, key, LOWEST)
        last_key = tl.max(key, axis=1)
        last_id = tl.min(tl.where(key == last_key[:, None], e, E - 1), axis=1)
        is_chosen = e == last_id[:, None]
        is_round = k[None, :] == i
        idx = tl.where(is_round, last_id[:, None], idx)
        own = tl.sum(tl.where(is_chosen, score, 0.0), axis=1)
        weights = tl.where(is_round, own[:, None], weights)
        if i == K:
            cutoff = tl.sum(tl.where(is_chosen, biased, 0.0), axis=1)
        rest = tl.max(tl.where(is_chosen, LOWEST, key), axis=1)
        best = tl.where(group[None, :] == here[:, None], rest[:, None], best)

    is_route = (k < K)[None, :]
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(is_route, weights, 0.0), axis=1) + 1e-20)[:, None]
    out = t[:, None] * K + k[None, :]
    tl.store(idx_ptr + out, idx.to(tl.int64), mask=is_token[:, None] & is_route)
    tl.store(weight_ptr + out, weights * scaling_factor, mask=is_token[:, None] & is_route)
    tl.store(cutoff_ptr + t, tl.where(cutoff == cutoff, cutoff, -float("inf")), mask=is_token)
