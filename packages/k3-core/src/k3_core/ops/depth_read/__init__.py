"""Op depth_read: what stands between two sublayers with Attention Residuals (report 3.1).

The last output joins the running sum, the sources are mixed (`attn_res`) and the mix is normed
(`rms_norm`) for the next sublayer. T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class DepthRead(Protocol):
    """Signature that every implementation of depth_read has."""

    def __call__(
        self,
        sources: Sequence[Tensor],
        prefix_TD: Tensor,
        added_TD: Tensor | None,
        norm_D: Tensor,
        proj_1D: Tensor,
        out_norm_D: Tensor,
        *,
        eps: float,
        out_eps: float,
    ) -> tuple[Tensor, Tensor]:
        """(x, sum), both [T, D]: sum = prefix + added in the dtype of `prefix`, which is returned
        itself without `added`, and x = rms_norm(attn_res([*sources, sum], norm, proj), out_norm).

        Raises ValueError for shapes that do not fit.
        """
        ...
