"""route_topk as a compiled loop, for a few tokens on a CPU.

T tokens, E experts, k routes a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes, reference
from k3_core.replay import launch
from k3_kernels.loops import DTYPES, compiled, is_for_one_thread, part, takes, vector
from k3_kernels.loops.math import exp

MAX_SCORES = 2**17
"""Scores of a call, for `is_for_one_thread`."""


def route_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    activation: str = "sigmoid",
    histogram_EB: Tensor | None = None,
    is_counted_T: Tensor | None = None,
) -> Routes:
    """As `route_topk.reference`, with the lowest id first among equal biased scores.

    The reference itself serves several groups, softmax scores, many tokens and histograms.
    """
    num_tokens, num_experts = logits_TE.shape
    if (
        num_groups != 1
        or activation != "sigmoid"
        or histogram_EB is not None
        or not 1 <= top_k <= num_experts
        or not is_for_one_thread(num_tokens * num_experts, MAX_SCORES)
        or bias_E.shape != (num_experts,)
        or not takes(logits_TE, bias_E)
    ):
        # It also raises for values that no implementation takes.
        return reference.route_topk(
            logits_TE,
            bias_E,
            top_k=top_k,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            num_groups=num_groups,
            topk_groups=topk_groups,
            activation=activation,
            histogram_EB=histogram_EB,
            is_counted_T=is_counted_T,
        )
    logits_TE, bias_E = logits_TE.contiguous(), bias_E.contiguous()
    routes = Routes(
        logits_TE.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits_TE.new_empty(num_tokens, top_k),
        logits_TE.new_empty(num_tokens, num_experts),
        logits_TE.new_empty(num_tokens),
    )
    launch(
        _route_rows,
        logits_TE.data_ptr(),
        bias_E.data_ptr(),
        routes.idx_Tk.data_ptr(),
        routes.weight_Tk.data_ptr(),
        routes.scores_TE.data_ptr(),
        routes.cutoff_T.data_ptr(),
        num_tokens,
        num_experts,
        top_k,
        renormalize,
        float(scaling_factor),
        DTYPES[logits_TE.dtype],
    )
    return routes


@compiled
def _route_rows(
    logits: int,
    bias: int,
    idx: int,
    weight: int,
    scores: int,
    cutoff: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    scaling: float,
    dtype: Any,
) -> None:
    bias_E, cutoff_T = vector(bias, num_experts, dtype), vector(cutoff, num_tokens, dtype)
    # One place more than there are routes, for the best of the others.
    best, ids = np.empty(top_k + 1, dtype), np.empty(top_k + 1, np.int64)
    for t in range(num_tokens):
        logits_E = part(logits, t * num_experts, num_experts, dtype)
        scores_E = part(scores, t * num_experts, num_experts, dtype)
        for e in range(num_experts):
            scores_E[e] = 1 / (1 + exp(-logits_E[e]))
        best[top_k] = -np.inf
        _choose(scores_E, bias_E, best, ids)
        cutoff_T[t] = best[top_k]
        idx_k = part(idx, t * top_k, top_k, np.int64)
        weight_k = part(weight, t * top_k, top_k, dtype)
        total = dtype.type(1e-20)
        for k in range(top_k):
            idx_k[k] = ids[k]
            weight_k[k] = scores_E[ids[k]]
            total += weight_k[k]
        factor = scaling / total if renormalize else scaling
        for k in range(top_k):
            weight_k[k] *= factor


@compiled
def _choose(scores_E: np.ndarray, bias_E: np.ndarray, best: np.ndarray, ids: np.ndarray) -> None:
    """The best of score + bias and their ids, in order; NaN counts as -inf."""
    count = 0
    for e in range(len(scores_E)):
        value = scores_E[e] + bias_E[e]
        if value != value:
            value = -np.inf
        if count < len(best):
            count += 1
        elif value <= best[count - 1]:
            continue
        place = count - 1
        while place > 0 and best[place - 1] < value:
            best[place], ids[place] = best[place - 1], ids[place - 1]
            place -= 1
        best[place], ids[place] = value, e
