"""The arithmetic of one token of KDA, shared by the decode kernels; float32 in registers.

Exponentials are of base 2, which one instruction computes (1.4426950408889634 is log2 e).
Legend: K key channels, V value channels, of which a program holds some.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def gate_rate(A_log):
    """-exp(A_log) log2 e, what the raw gate and its bias are multiplied by."""
    return tl.exp2(A_log.to(tl.float32) * 1.4426950408889634) * -1.4426950408889634


@triton.jit
def decay_of(gate, bias, rate, lower_bound):
    """exp(lower_bound sigmoid(exp(A_log) (gate + bias))) of each key channel."""
    return tl.exp2((lower_bound * 1.4426950408889634) / (1.0 + tl.exp2((gate + bias) * rate)))


@triton.jit
def unit_factor(x):
    """What brings x to unit length: 1 / sqrt(sum x^2 + 1e-6)."""
    return tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def over_keys(x):
    """The sum of each row, [V], of [V, K] or of [V, J, K / J], whose J is summed first: it lies in
    one thread, which leaves less to exchange."""
    if len(x.shape) == 3:
        x = tl.sum(x, 1)
    return tl.sum(x, 1)


@triton.jit
def add_write(state, write, k, k_factor):
    """State [V, K] or [V, J, K / J] plus the outer product; k has a leading dimension of 1."""
    write = (write * k_factor)[:, None]
    if len(state.shape) == 3:
        write = write[:, :, None]
    return state + write * k


@triton.jit
def advance(state, q, k, v, decay, beta, q_factor, k_factor, kq):
    """State [V, K] or [V, J, K / J] after the token, its write u [V] and o [V].

    q, k and decay have the state's shape, with 1 for V. q and k are not normalised: their factors
    multiply the products, so that the sums over V x K need not wait for them; kq is the product of
    the normalised two. Both reads are of the decayed state, one pass: S q after the write is
    S q + u (k q).
    """
    state *= decay
    write = beta * (v - over_keys(state * k) * k_factor)
    o = over_keys(state * q) * q_factor + write * kq
    return add_write(state, write, k, k_factor), write, o
