"""Results of route_topk without values, for graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op.arguments import Written
from k3_core.ops.route_topk import Routes

CONSTANT_RESULTS = (0, 3)


def meta(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    activation: str = "sigmoid",
    histogram_EB: Written = None,
    is_counted_T: Tensor | None = None,
) -> Routes:
    """Ids, and the rest as the logits."""
    num_tokens = logits_TE.shape[0]
    return Routes(
        logits_TE.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits_TE.new_empty(num_tokens, top_k),
        logits_TE.new_empty(logits_TE.shape),
        logits_TE.new_empty(num_tokens),
    )
