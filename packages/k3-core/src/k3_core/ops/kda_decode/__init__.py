"""Op kda_decode: a KDA layer's decode rows from the projections to the gated norm (report 1.8).

`short_conv`, `kda_step` and `gated_rms_norm` one after the other, on pools of states and
convolution windows. What a layer does for one token of a sequence is little, so that one launch
for all of it counts; see `kda_step` for verifying several tokens.

Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C = H (2 K + V) channels,
R = taps - 1 inputs of a window.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KdaDecode(Protocol):
    """Signature that every implementation of kda_decode has."""

    def __call__(
        self,
        x_BWC: Tensor,
        conv_weight_C1R: Tensor,
        gate_BWHK: Tensor,
        beta_BWH: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        out_gate_BWHV: Tensor,
        norm_weight_V: Tensor,
        *,
        state_SHVK: Tensor,
        window_SCR: Tensor,
        slots_B: Tensor,
        lower_bound: float | None,
        eps: float,
        scale: float | None = None,
        keys_BWHK: Tensor | None = None,
        writes_BWHV: Tensor | None = None,
    ) -> Tensor:
        """y [B, W, H, V] in the output gate's dtype, before the output projection.

        x: projected q, k and v before the convolution, side by side; the weight [C, 1, taps] alike.
        Gate, beta, decay and states are those of `kda_step`, windows [S, C, R] those of
        `short_conv`; both pools are updated in place with all W tokens. Slot -1 marks a padded
        row: its output is zero and nothing is touched. Inference only: no gradients.

        keys and writes, both or neither, make the call a verify step: neither pool changes, and
        they receive k after the convolution (x's dtype) and what each token would write (the
        state's). With them, gate and x, `kda_replay` moves states and windows.

        Raises as kda_step does, and ValueError for shapes that do not fit.
        """
        ...
