"""Checks of kda_replay's windows (report 1.8).

Legend: B rows, W tokens a row, S slots, C channels of the convolution, R = taps - 1.
"""

from __future__ import annotations

from torch import Tensor


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
