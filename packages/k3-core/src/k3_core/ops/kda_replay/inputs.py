"""Checks of kda_replay (report 1.8).

Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C channels of the
convolution, R = taps - 1.
"""

from __future__ import annotations

from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_core.ops.kda_step.inputs import check_writes, live_rows, token_counts
from k3_core.ops.math import math_dtype


def check_windows(
    x_BWC: Tensor | None, window_SCR: Tensor | None, num_slots: int, lead: tuple[int, ...]
) -> None:
    """Raise ValueError unless both are None or fit each other and the records."""
    if x_BWC is None or window_SCR is None:
        if x_BWC is not window_SCR:
            raise ValueError("kda_replay: give x and window, or neither")
        return
    if x_BWC.dim() != 3 or x_BWC.shape[:2] != lead:
        raise ValueError(f"kda_replay: x must be {[*lead, 'C']}, got {list(x_BWC.shape)}")
    if window_SCR.dim() != 3 or window_SCR.shape[:2] != (num_slots, x_BWC.shape[2]):
        raise ValueError(
            f"kda_replay: window must be {[num_slots, x_BWC.shape[2], 'taps - 1']}, got "
            f"{list(window_SCR.shape)}"
        )


def check_replay(
    args: tuple[Tensor, ...],
    state_SHVK: Tensor,
    slots_B: Tensor,
    num_accepted_B: Tensor,
    lower_bound: float | None,
    x_BWC: Tensor | None,
    window_SCR: Tensor | None,
) -> tuple[list[int], list[int]]:
    """Check a call of kda_replay; returns its live rows and the tokens each row accepted.

    `args` are the positional ones, k to dt_bias. Raises as `k3_core.ops.kda_replay.KdaReplay` says.
    """
    k_BWHK, gate_BWHK, writes_BWHV, A_log_H, dt_bias_HK = args
    decay_args = (gate_BWHK, gate_BWHK[..., 0], A_log_H, dt_bias_HK)
    check_inputs("kda_replay", k_BWHK, k_BWHK, k_BWHK, *decay_args, lower_bound)
    (num_rows, num_tokens, num_heads, num_k), num_v = k_BWHK.shape, writes_BWHV.shape[-1]
    num_slots, dtype = state_SHVK.shape[0], math_dtype(k_BWHK)
    check_writes("kda_replay", writes_BWHV, (*k_BWHK.shape[:3], num_v), dtype, k_BWHK.device)
    shape = (num_slots, num_heads, num_v, num_k)
    check_state("kda_replay", "state", state_SHVK, shape, k_BWHK)
    check_windows(x_BWC, window_SCR, num_slots, (num_rows, num_tokens))
    rows = live_rows("kda_replay", slots_B, num_rows, num_slots)
    return rows, token_counts("kda_replay", "num_accepted", num_accepted_B, num_rows, num_tokens)
