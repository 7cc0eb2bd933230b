"""Op short_conv: causal depthwise convolution and SiLU before KDA (architecture 3.2 step 1).

Legend: T packed tokens, N sequences, C channels, W taps.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ShortConv(Protocol):
    """Signature that every implementation of short_conv has."""

    def __call__(
        self,
        x_TC: Tensor,
        weight_C1W: Tensor,
        *,
        cu_seqlens_N1: Tensor,
        seqlens: tuple[int, ...] | None = None,
        initial_state_NCW: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """y[t] = SiLU(sum_j weight[:, 0, j] x[t - (W - 1) + j]) inside each sequence, x's dtype.

        The state [N, C, W - 1] holds the last W - 1 inputs before the convolution, oldest first;
        no initial state means zeros. A sequence shorter than W - 1 keeps the newest part of its old
        state in front of its inputs. The final state has the initial state's dtype, else x's.
        Products are summed in float32 (float64 for float64 inputs). Gradients reach x, the weight
        and the initial state, through y and through the final state.

        `seqlens` is a host copy of the lengths; without it cu_seqlens is read, which waits for the
        device. Raises ValueError or TypeError for shapes, lengths and dtypes that do not fit.
        """
        ...
