"""What a token of KDA takes as compiled loops, for the ops that step on a CPU.

Legend: B rows, C channels of the convolution, R inputs of its window, K key, V value channels,
N numbers of a state or of the windows.
"""

from __future__ import annotations

import math

import numpy as np

from k3_core.ops.kda_chunk.inputs import L2_EPS
from k3_kernels.loops import compiled
from k3_kernels.loops.math import exp

_SOFTPLUS_LINEAR = 20.0
"""Where torch's softplus becomes the identity."""


@compiled
def slots_fit(slots_B: np.ndarray, num_slots: int) -> bool:
    """Whether slots are -1 or in the pool, and none of it is used twice."""
    for b in range(len(slots_B)):
        if slots_B[b] < -1 or slots_B[b] >= num_slots:
            return False
        for other in range(b):
            if slots_B[b] >= 0 and slots_B[b] == slots_B[other]:
                return False
    return True


@compiled
def move_window(x_C: np.ndarray, window_N: np.ndarray) -> None:
    """The windows [C, R] of the convolution take a token's inputs as their last; R is not 0."""
    num_inputs = len(window_N) // len(x_C)
    # All move by one, over the ends of channels too; then each gets its last.
    for n in range(1, len(window_N)):
        window_N[n - 1] = window_N[n]
    for c in range(len(x_C)):
        window_N[(c + 1) * num_inputs - 1] = x_C[c]


@compiled
def decay(
    gate_K: np.ndarray, bias_K: np.ndarray, A_log: float, lower_bound: float, decay_K: np.ndarray
) -> None:
    """What a token leaves of each channel, from its raw gate; a bound of 0 stands for none."""
    one, lowest = gate_K.dtype.type(1), gate_K.dtype.type(lower_bound)
    rate = exp(A_log)
    if lowest < 0:
        for k in range(len(gate_K)):
            decay_K[k] = lowest / (one + exp(-rate * (gate_K[k] + bias_K[k])))
    else:
        for k in range(len(gate_K)):
            z = gate_K[k] + bias_K[k]
            decay_K[k] = -rate * (z if z > _SOFTPLUS_LINEAR else math.log1p(exp(z)))
    for k in range(len(gate_K)):
        decay_K[k] = exp(decay_K[k])


@compiled
def normalize(x_K: np.ndarray, factor: float) -> None:
    """x times factor / sqrt(sum x^2 + 1e-6), in place."""
    total = x_K.dtype.type(0)
    for k in range(len(x_K)):
        total += x_K[k] * x_K[k]
    scale = x_K.dtype.type(factor / math.sqrt(total + L2_EPS))
    for k in range(len(x_K)):
        x_K[k] *= scale


@compiled
def advance(
    state_N: np.ndarray,
    q_K: np.ndarray,
    k_K: np.ndarray,
    v_V: np.ndarray,
    decay_K: np.ndarray,
    beta: float,
    o_V: np.ndarray,
) -> None:
    """A token of normalised q and k moves a state [V, K]; v becomes its write.

    A row of the state is read once for both products: with the write u = beta (v - k^T D S), the
    state after it is D S + u k^T, and what q reads there q^T D S + (q^T k) u.
    """
    num_k, zero = len(k_K), k_K.dtype.type(0)
    product = zero
    for k in range(num_k):
        product += q_K[k] * k_K[k]
    for v in range(len(v_V)):
        first, kept, asked = v * num_k, zero, zero
        for k in range(num_k):
            left = state_N[first + k] * decay_K[k]
            kept += left * k_K[k]
            asked += left * q_K[k]
        v_V[v] = beta * (v_V[v] - kept)
        o_V[v] = asked + product * v_V[v]
        for k in range(num_k):
            state_N[first + k] = state_N[first + k] * decay_K[k] + v_V[v] * k_K[k]


@compiled
def head_step(
    state_N: np.ndarray,
    q_K: np.ndarray,
    k_K: np.ndarray,
    v_V: np.ndarray,
    gate_K: np.ndarray,
    bias_K: np.ndarray,
    A_log: float,
    beta: float,
    lower_bound: float,
    scale: float,
    decay_K: np.ndarray,
    o_V: np.ndarray,
) -> None:
    """A token of raw inputs moves a head's state; v becomes its write, q and k are normalised.

    The decays need room only.
    """
    one = q_K.dtype.type(1)
    normalize(q_K, scale)
    normalize(k_K, 1.0)
    decay(gate_K, bias_K, A_log, lower_bound, decay_K)
    advance(state_N, q_K, k_K, v_V, decay_K, one / (one + exp(-beta)), o_V)
