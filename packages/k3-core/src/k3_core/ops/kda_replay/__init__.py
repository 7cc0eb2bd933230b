"""Op kda_replay: move states and convolution windows by the accepted tokens (report 1.8).

The second half of a verify step: `kda_step` with `writes_BWHV` has read the states without changing
them, and this op applies the tokens that were accepted. With u_i the recorded writes, k_i the
normalised keys and D_i = Diag(decay_i), a tokens accepted,

    S' = S D_1 ... D_a + sum_i u_i k_i^T D_{i+1} ... D_a        (S is [V, K])

which is what a steps of one token would have left. Heads do not meet, so that a call can take the
heads of all layers side by side where pool and records are laid out so ([S, L H, V, K] and so on).

Legend: B rows of the batch, W verified tokens a row, S slots of the pool, H heads, K key, V value
channels, C channels of the convolution, R = taps - 1 inputs of its window.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KdaReplay(Protocol):
    """Signature that every implementation of kda_replay has."""

    def __call__(
        self,
        k_BWHK: Tensor,
        gate_BWHK: Tensor,
        writes_BWHV: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        *,
        state_SHVK: Tensor,
        slots_B: Tensor,
        num_accepted_B: Tensor,
        lower_bound: float | None,
        x_BWC: Tensor | None = None,
        window_SCR: Tensor | None = None,
    ) -> None:
        """Apply the first `num_accepted_B` tokens of each row to `state_SHVK[slots_B]` in place.

        k, gate, A_log, dt_bias and the bound are those of the verify step, writes what it recorded.
        Rows with 0 accepted tokens and padded rows (slot -1) keep every bit. x and window, both or
        neither, are the inputs of the convolution in that step and its windows (oldest input
        first, as in short_conv), moved by as many tokens.

        Raises as kda_step does: IndexError for a slot outside -1..S-1, ValueError for a slot used
        twice, for a count outside 0..W and for shapes that do not fit.
        """
        ...
