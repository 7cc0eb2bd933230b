"""Op kda_step: KDA decode on a pool of states, one or a few tokens a sequence (report 1.8).

Legend: B rows of the batch, W tokens a row, S slots of the pool, H heads, K key, V value channels.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KdaStep(Protocol):
    """Signature that every implementation of kda_step has."""

    def __call__(
        self,
        q_BWHK: Tensor,
        k_BWHK: Tensor,
        v_BWHV: Tensor,
        gate_BWHK: Tensor,
        beta_BWH: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        *,
        state_SHVK: Tensor,
        slots_B: Tensor,
        lower_bound: float | None,
        scale: float | None = None,
        num_commit_B: Tensor | None = None,
    ) -> Tensor:
        """Run W tokens per row from `state_SHVK[slots_B]` and return o_BWHV (v's dtype).

        Raw inputs as for kda_chunk. The state (float32, float64 for float64 inputs, V first) is
        updated in place with the first `num_commit_B` tokens of each row (None: all W), so that a
        verify step of speculative decoding keeps only what was accepted; outputs cover all W.
        slots_B is int32 or int64 `[B]` of any stride, each slot at most once; slot -1 marks a
        padded row: its output is zero and no state changes. Inference only: no gradients.

        Raises IndexError for a slot outside -1..S-1, ValueError for a slot used twice, for a commit
        count outside 0..W and for shapes that do not fit.
        """
        ...
