"""Op gated_mla_decode: decode rows of a Gated MLA layer between its projections (architecture 3.3).

The norms of queries and latent, the second factor of the queries, the absorbed queries, the new
row of the cache, attention (`mla_decode`), the values and the output gate: what a layer does for
one token of a sequence is little, so that one call for all of it counts.

Legend: B rows, H heads, Q rank of the queries, N nope dim, R shared key dim, V value dim, C kv
latent, X = C + R cached values a token, P pages of L tokens, M pages a sequence, D = N + R,
E = N + V.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GatedMlaDecode(Protocol):
    """Signature that every implementation of gated_mla_decode has."""

    def __call__(
        self,
        q_BQ: Tensor,
        latent_BX: Tensor,
        gate_BHV: Tensor,
        q_norm_Q: Tensor,
        q_weight_HDQ: Tensor,
        kv_norm_C: Tensor,
        kv_weight_HEC: Tensor,
        *,
        pages_PLX: Tensor,
        page_table_BM: Tensor,
        lengths_B: Tensor,
        scale: float,
        eps: float,
    ) -> Tensor:
        """y [B, H, V] in the dtype of q, before the output projection.

        q, latent and gate are the first projections of one token a row, the token that
        `lengths_B`, from 1 on, counts as the last: its latent is normed and written to that place
        of the row's pages, then each row attends over its `lengths` tokens as in `mla_decode`.
        Several rows may be tokens of one sequence. Inference only: no gradients.

        Raises ValueError for shapes that do not fit.
        """
        ...
