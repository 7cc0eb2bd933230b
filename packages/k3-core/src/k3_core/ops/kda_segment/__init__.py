"""Op kda_segment: what a stretch of tokens does to a KDA state, as an affine map (report 1.6, 1.7).

Convention, for states stored value channels first (S of shape [V, K]):

    state_after = state_before @ M + S

M [K, K] is the product over tokens, earliest leftmost, of diag(alpha_t) (I - beta_t k_t k_t^T): the
transpose of the report's M_t. S [V, K] is the state reached from zero. An empty stretch is the
identity map (M = I, S = 0). A gradient goes backwards by `d_before = d_after @ M^T`.
Legend: T packed tokens, N stretches, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

AffineMap = tuple[Tensor, Tensor]
"""(M_NHKK, S_NHVK)"""


class KdaSegment(Protocol):
    """Signature that every implementation of kda_segment has."""

    def __call__(
        self,
        k_THK: Tensor,
        v_THV: Tensor,
        gate_THK: Tensor,
        beta_TH: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        *,
        lower_bound: float | None,
        cu_seqlens_N1: Tensor,
        seqlens: tuple[int, ...] | None = None,
    ) -> AffineMap:
        """(M_NHKK, S_NHVK) of each packed stretch; raw inputs, dtypes and errors as kda_chunk.

        float32 (float64 for float64 inputs): M is a long product and stays in full precision.
        Differentiable in every float input.
        """
        ...


def apply_map(state_NHVK: Tensor, segment: AffineMap) -> Tensor:
    """The state after a stretch that starts from `state_NHVK`."""
    M_NHKK, S_NHVK = segment
    return state_NHVK @ M_NHKK + S_NHVK


def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """The map of `first` followed by `second`; associative, which is what KCP relies on."""
    return first[0] @ second[0], apply_map(first[1], second)
