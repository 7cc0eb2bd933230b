"""route_topk: the choice of experts (report 4, architecture 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Routes(NamedTuple):
    """What a router decided for T tokens, E experts, k routes a token."""

    idx_Tk: Tensor
    """int64, the chosen experts, best biased score first."""
    weight_Tk: Tensor
    """float32 mixture weights; they do not depend on the balancing bias."""
    scores_TE: Tensor
    """float32 unbiased scores of all experts."""
    cutoff_T: Tensor
    """float32, the biased score of the first expert that was not chosen (-inf if there is none)."""
