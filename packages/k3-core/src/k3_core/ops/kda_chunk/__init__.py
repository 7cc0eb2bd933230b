"""Op kda_chunk: Kimi Delta Attention over packed sequences (report 1.1, 1.2; architecture 3.2).

`reference.py` is the recurrence token by token, `cpu.py` the chunk form with its exact backward.
Legend: T packed tokens, N sequences, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KdaChunk(Protocol):
    """Signature that every implementation of kda_chunk has."""

    def __call__(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
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

        `seqlens` is a host copy of the lengths; without it cu_seqlens is read, which waits for the
        device. Raises ValueError or TypeError for shapes, lengths and dtypes that do not fit.
        """
        ...
