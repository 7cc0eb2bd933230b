"""Op kda_chunk: Kimi Delta Attention over packed sequences (report 1.1, 1.2; architecture 3.2).

`reference.py` is the recurrence token by token.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key channels, V value channels,
E checkpoints.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KdaChunk(Protocol):
    """Signature that every implementation of kda_chunk has."""

    def __call__(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THV: Tensor,
        gate_THK: Tensor,
        beta_TH: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        *,
        lower_bound: float | None,
        scale: float | None = None,
        cu_seqlens_N1: Tensor,
        seqlens: tuple[int, ...] | None = None,
        initial_state_NHVK: Tensor | None = None,
        output_final_state: bool = False,
        checkpoint_offsets: tuple[tuple[int, ...], ...] | None = None,
        checkpoints_EHVK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence; per head and token, with S of shape [V, K]:

            q, k <- q / sqrt(sum q^2 + 1e-6), k likewise;  q <- q * scale (default K^-0.5)
            g = lower_bound * sigmoid(exp(A_log) * (gate + dt_bias))
                or -exp(A_log) * softplus(gate + dt_bias) when lower_bound is None
            S <- S diag(e^g);  S <- S + sigmoid(beta) (v - S k) k^T;  o = S q

        Inputs are raw: q, k, v after convolution and SiLU, gate before its bias, beta as logits.
        q, k and v share one dtype. float64 is computed in float64; float32, bfloat16 and float16 in
        float32, whatever autocast says. o_THV has v's dtype, the final state [N, H, V, K] the
        compute dtype, and so must the initial state. A sequence of length 0 keeps its initial
        state. Gradients reach every float input, through o and through the final state.

        H is a multiple of G: consecutive value heads share the queries and keys of one key head.

        `checkpoint_offsets` are, for each sequence, increasing numbers of its tokens (from 1 to its
        length) after which the state is written to checkpoints_EHVK, in this order, in the compute
        dtype and without gradients (a contiguous buffer). The two are given together.

        `seqlens` is a host copy of the lengths; without it cu_seqlens is read, which waits for the
        device. Raises ValueError or TypeError for shapes, lengths and dtypes that do not fit.
        """
        ...
