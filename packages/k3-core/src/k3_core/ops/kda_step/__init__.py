"""Op kda_step: KDA decode on a pool of states, one or a few tokens a sequence (report 1.8).

Speculative decoding keeps no state a draft token. There are two ways, and both are exact:

- Verify, then replay: `kda_step` with `writes_BWHV` leaves the states as they are and records what
  each token would write; `kda_replay` applies the accepted ones. Records of a token and head are
  the write (V values), k and the raw gate (K each) against V x K of a state.
- Replay in the next step (report 1.8): the accepted tokens come again in front of the new ones,
  and `num_commit_B` says how many of a row's tokens are final.

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
        writes_BWHV: Tensor | None = None,
    ) -> Tensor:
        """Run W tokens per row from `state_SHVK[slots_B]` and return o_BWHV (v's dtype).

        Raw inputs as for kda_chunk. The state (float32, float64 for float64 inputs, V first) is
        updated in place with the first `num_commit_B` tokens of each row (None: all W); outputs
        cover all W. slots_B is int32 or int64 `[B]` of any stride, each slot at most once; slot -1
        marks a padded row: its output is zero and no state changes. Inference only: no gradients.

        `writes_BWHV` (the state's dtype) makes the call a verify step: no state changes, and the
        tensor receives u = beta (v - k^T S) of every token, zeros in padded rows. With k and gate,
        which the caller keeps, that is all `kda_replay` needs. It excludes `num_commit_B`.

        Raises IndexError for a slot outside -1..S-1, ValueError for a slot used twice, for a commit
        count outside 0..W and for shapes that do not fit.
        """
        ...
