"""Gradients of route_topk by Triton. T tokens, E experts, k routes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients
from k3_kernels.route_topk.backward_kernel import route_topk_backward_kernel

ROWS = 8
"""Tokens of a program of one warp."""


def backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needs: Any,
    results: Sequence[Tensor],
    renormalize: bool,
    scaling_factor: float,
    activation: str,
) -> Gradients:
    """The gradient of the logits, from those of the weights and, if there are any, of the scores.

    Ids and cutoff have none, nor has the bias, which serves the choice only.
    """
    _, d_weight_Tk, d_scores_TE, _ = grads
    idx_Tk, _, scores_TE, _ = results
    is_softmax = activation == "softmax"
    # With gradients of all scores the choice's are gradients of scores too, to be added to them.
    is_direct = d_scores_TE is None and not is_softmax
    d_TE = torch.zeros_like(scores_TE)
    if d_weight_Tk is not None and idx_Tk.numel():
        num_tokens, top_k = idx_Tk.shape
        route_topk_backward_kernel[(triton.cdiv(num_tokens, ROWS),)](
            idx_Tk,
            scores_TE,
            d_weight_Tk.contiguous(),
            d_TE,
            num_tokens,
            float(scaling_factor),
            E=scores_TE.shape[1],
            K=top_k,
            RENORMALIZE=renormalize,
            IS_SCORE=not is_direct,
            ROWS=ROWS,
            KPAD=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    if is_direct:
        return {"logits_TE": d_TE}
    if d_scores_TE is not None:
        d_TE = d_TE + d_scores_TE
    if is_softmax:
        d_TE = d_TE - (d_TE * scores_TE).sum(-1, keepdim=True)
        return {"logits_TE": d_TE * scores_TE}
    return {"logits_TE": d_TE * scores_TE * (1 - scores_TE)}
