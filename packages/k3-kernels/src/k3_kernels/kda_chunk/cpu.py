"""kda_chunk in chunk form, plain torch on any device, with its closed-form backward.

Everything that does not depend on the state is batched over all chunks and heads; only the scan
over chunk steps is serial (report 1.2, 1.3; gate: 1.1). The backward needs no derivative of the
inverse: with X = (I + diag(beta) A)^-1, D = X diag(beta) (V - Kp S) and dX = X^T dD, the gradient
of beta is rowsum(dX D) / beta, whose quotient cancels against the derivative of the sigmoid.
`kda_chunk_activated` is the same on inputs whose norms, decays and betas are given.
Legend: T packed tokens, N sequences, H heads, B chunk-heads, C tokens in a chunk, K key, V value
channels, R states (sequences x heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import (
    L2_EPS,
    check_checkpoints,
    check_inputs,
    check_state,
    repeat_heads,
)
from k3_core.ops.math import math_dtype
from k3_core.ops.varlen import host_lengths
from k3_kernels.kda_chunk.cpu_checkpoints import run_with_checkpoints
from k3_kernels.kda_chunk.cpu_gram import (
    Decay,
    chunk_decay,
    gram_operands,
    grams,
    grams_backward,
    running_sum,
    tile_width,
)
from k3_kernels.kda_chunk.cpu_plan import ChunkPlan, chunk_plan
from k3_kernels.kda_chunk.cpu_scan import scan_backward, scan_forward
from k3_kernels.once import refuse_second_derivative

CHUNK = 32
_LEAST_BETA = 1e-20


class Inputs(NamedTuple):
    """Raw inputs, as the op receives them; the initial state in the compute dtype."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    gate_THK: Tensor
    beta_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    state_NHVK: Tensor


class Settings(NamedTuple):
    """What is not differentiated."""

    plan: ChunkPlan
    lower_bound: float | None
    scale: float
    dtype: torch.dtype
    is_raw: bool = True  # norms, gate and sigmoid are inside


class Saved(NamedTuple):
    """What the forward keeps for the backward, in chunk layout and compute dtype."""

    q_BCK: Tensor  # normalised
    q_rnorm_BC1: Tensor | None  # None where q came normalised
    k_BCK: Tensor
    k_rnorm_BC1: Tensor | None
    z_BCK: Tensor | None  # gate + dt_bias; None where the decay was given
    beta_BC1: Tensor  # after the sigmoid, 0 at padding
    w_BCK: Tensor  # W
    values_BCV: Tensor  # D
    inverse_BCC: Tensor  # X
    gram_BCC: Tensor  # P
    state_BVK: Tensor | None  # before each chunk


@custom_op("kda_chunk.cpu")
def kda_chunk(
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
    """KDA over packed sequences; arguments and results as `k3_core.ops.kda_chunk.KdaChunk`."""
    args = (q_TGK, k_TGK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    check_inputs("kda_chunk", *args, lower_bound, is_grouped=True)
    lengths = host_lengths(cu_seqlens_N1, seqlens, q_TGK.shape[0], "kda_chunk")
    (_, num_heads, num_v), num_k = v_THV.shape, q_TGK.shape[-1]
    dtype = math_dtype(q_TGK)
    shape = (len(lengths), num_heads, num_v, num_k)
    if initial_state_NHVK is None:
        initial_state_NHVK = q_TGK.new_zeros(shape, dtype=dtype)
    check_state("kda_chunk", "initial_state", initial_state_NHVK, shape, q_TGK)
    offsets = check_checkpoints(checkpoint_offsets, checkpoints_EHVK, lengths, shape, q_TGK)
    heads = (repeat_heads(q_TGK, num_heads), repeat_heads(k_TGK, num_heads), *args[2:])
    scale = num_k**-0.5 if scale is None else scale

    def run(tensors: Sequence[Tensor], lengths: Sequence[int], state: Tensor) -> list[Tensor]:
        plan = chunk_plan(tuple(lengths), num_heads, CHUNK, state.device)
        settings = Settings(plan, lower_bound, scale, dtype)
        return list(_run(Inputs._make((*tensors, state)), settings))

    if checkpoints_EHVK is None:
        o_THV, final_NHVK = run(heads, lengths, initial_state_NHVK)
    else:
        o_THV, final_NHVK = run_with_checkpoints(
            run, heads, lengths, initial_state_NHVK, offsets, checkpoints_EHVK
        )
    return o_THV, final_NHVK if output_final_state else None


def kda_chunk_activated(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_THK: Tensor,
    beta_TH: Tensor,
    *,
    lower_bound: float | None,
    scale: float,
    seqlens: tuple[int, ...],
    initial_state_NHVK: Tensor,
) -> tuple[Tensor, Tensor]:
    """kda_chunk without its activations: q and k as they are, log decays g <= 0, beta itself.

    beta may be any number, 2 sigmoid(b) for one. `lower_bound` promises g >= lower_bound; None
    promises nothing and costs narrower tiles. Computes in the state's dtype and returns o in v's
    and the final state. Shapes, devices and `sum(seqlens) == T` are the caller's to check.
    """
    num_heads, dtype = q_THK.shape[1], initial_state_NHVK.dtype
    plan = chunk_plan(seqlens, num_heads, CHUNK, q_THK.device)
    nothing = q_THK.new_empty(0)
    args = (q_THK, k_THK, v_THV, log_decay_THK, beta_TH, nothing, nothing)
    settings = Settings(plan, lower_bound, scale, dtype, is_raw=False)
    return _run(Inputs(*args, initial_state_NHVK), settings)


def _run(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _KdaChunk.apply(settings, *inputs)
    return _forward(inputs, settings, keep_states=False)[:2]


class _KdaChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*tensors)
        o_THV, final_NHVK, saved, decay = _forward(inputs, settings, keep_states=True)
        ctx.settings = settings
        ctx.dtypes = [x.dtype for x in tensors]
        ctx.save_for_backward(inputs.A_log_H, *saved, *decay)
        return o_THV, final_NHVK

    @staticmethod
    def backward(ctx: Any, d_o_THV: Tensor, d_final_NHVK: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("kda_chunk")
        A_log_H, *rest = ctx.saved_tensors
        num_saved = len(Saved._fields)
        saved, decay = Saved(*rest[:num_saved]), Decay(*rest[num_saved:])
        with torch.autocast(d_o_THV.device.type, enabled=False):
            grads = _backward(d_o_THV, d_final_NHVK, A_log_H, saved, decay, ctx.settings)
        return None, *(x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True))


def _forward(
    inputs: Inputs, settings: Settings, keep_states: bool
) -> tuple[Tensor, Tensor, Saved, Decay]:
    plan, dtype = settings.plan, settings.dtype
    with torch.autocast(inputs.q_THK.device.type, enabled=False):
        q_BCK, k_BCK = plan.gather(inputs.q_THK, dtype), plan.gather(inputs.k_THK, dtype)
        v_BCV, beta_BC1 = plan.gather(inputs.v_THV, dtype), plan.gather(inputs.beta_TH, dtype)
        g_BCK = plan.gather(inputs.gate_THK, dtype)
        q_rnorm = k_rnorm = z_BCK = None
        if settings.is_raw:
            q_BCK, q_rnorm = _normalize(q_BCK)
            k_BCK, k_rnorm = _normalize(k_BCK)
            beta_BC1 = beta_BC1.sigmoid_()
            z_BCK = _by_head(g_BCK, inputs.dt_bias_HK, torch.add)
            g_BCK = _log_decay(z_BCK, inputs.A_log_H, settings)
        else:  # the backward divides by beta what beta has scaled; this changes no result
            beta_BC1 = torch.where(beta_BC1.abs() < _LEAST_BETA, _LEAST_BETA, beta_BC1)
        beta_BC1, g_BCK = plan.zero_padding(beta_BC1), plan.zero_padding(g_BCK)
        decay = chunk_decay(g_BCK, tile_width(settings.lower_bound, plan.chunk))

        gram_B2CC = grams(gram_operands(q_BCK, k_BCK, decay), decay)
        inverse_BCC = _unit_lower_inverse(gram_B2CC[:, 1] * beta_BC1)
        weights_BCC = inverse_BCC * beta_BC1.mT
        w_BCK = torch.bmm(weights_BCC, k_BCK * decay.from_start_BCK)
        values_BCV = torch.bmm(weights_BCC, v_BCV)
        state_RVK = inputs.state_NHVK.index_select(0, plan.order_N).flatten(0, 1)
        saved_BVK = None
        if keep_states:
            saved_BVK = q_BCK.new_empty(q_BCK.shape[0], *state_RVK.shape[1:])
        o_BCV = scan_forward(
            state_RVK,
            q_BCK * decay.from_start_BCK,
            w_BCK,
            values_BCV,
            k_BCK * decay.to_end_BCK,
            decay.total_B1K,
            plan.step_sizes,
            saved_BVK,
        )
        o_BCV.baddbmm_(gram_B2CC[:, 0], values_BCV).mul_(settings.scale)
        o_THV = plan.scatter(o_BCV, inputs.v_THV.dtype)
        final_NHVK = state_RVK.view(inputs.state_NHVK.shape).index_select(0, plan.rank_N)
    saved = Saved(
        q_BCK,
        q_rnorm,
        k_BCK,
        k_rnorm,
        z_BCK,
        beta_BC1,
        w_BCK,
        values_BCV,
        inverse_BCC,
        gram_B2CC[:, 0],
        saved_BVK,
    )
    return o_THV, final_NHVK, saved, decay


def _backward(
    d_o_THV: Tensor,
    d_final_NHVK: Tensor,
    A_log_H: Tensor,
    saved: Saved,
    decay: Decay,
    settings: Settings,
) -> Inputs:
    """Gradients of all inputs, in the compute dtype."""
    plan, dtype = settings.plan, settings.dtype
    beta_BC1, values_BCV = saved.beta_BC1, saved.values_BCV
    d_o_BCV = plan.zero_padding(plan.gather(d_o_THV, dtype).mul(settings.scale))
    d_values_BCV = torch.bmm(saved.gram_BCC.mT, d_o_BCV)
    d_state_RVK = d_final_NHVK.index_select(0, plan.order_N).flatten(0, 1)
    assert saved.state_BVK is not None
    d_writes_BCK, d_total_BK = scan_backward(
        d_state_RVK,
        d_o_BCV,
        d_values_BCV,
        saved.q_BCK * decay.from_start_BCK,
        saved.w_BCK,
        values_BCV,
        saved.k_BCK * decay.to_end_BCK,
        decay.total_B1K,
        saved.state_BVK,
        plan.step_sizes,
    )
    d_state_NHVK = d_state_RVK.view(d_final_NHVK.shape).index_select(0, plan.rank_N)

    d_solved_BCV = torch.bmm(saved.inverse_BCC.mT, d_values_BCV)
    d_beta_BC1 = (d_solved_BCV * values_BCV).sum(-1, keepdim=True)
    d_beta_BC1 = d_beta_BC1 * (1 - beta_BC1) if settings.is_raw else d_beta_BC1 / beta_BC1
    d_v_BCV = d_solved_BCV.mul_(beta_BC1)
    d_q_BCK, d_k_BCK, d_g_BCK = _operand_gradients(
        torch.cat([d_o_BCV, -d_v_BCV], dim=1), d_writes_BCK, d_total_BK, saved, decay
    )
    d_g_BCK = plan.zero_padding(d_g_BCK)
    if saved.z_BCK is None:
        d_z_BCK, d_A_log_H, d_bias_HK = d_g_BCK, A_log_H, A_log_H
    else:
        d_z_BCK, d_A_log_H = _log_decay_backward(d_g_BCK, saved.z_BCK, A_log_H, settings)
        d_bias_HK = d_z_BCK.view(-1, plan.num_heads, *d_z_BCK.shape[1:]).sum((0, 2))
    return Inputs(
        plan.scatter(_normalize_backward(d_q_BCK, saved.q_BCK, saved.q_rnorm_BC1), dtype),
        plan.scatter(_normalize_backward(d_k_BCK, saved.k_BCK, saved.k_rnorm_BC1), dtype),
        plan.scatter(d_v_BCV, dtype),
        plan.scatter(d_z_BCK, dtype),
        plan.scatter(d_beta_BC1, dtype).squeeze(-1),
        d_A_log_H,
        d_bias_HK,
        d_state_NHVK,
    )


def _operand_gradients(
    d_out_BXV: Tensor, d_writes_BCK: Tensor, d_total_BK: Tensor, saved: Saved, decay: Decay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of normalised q and k and of the log decay, from (dO, -dR) (report 1.3).

    X = 2 C: both gradients below each other, so that each product is made once for both. What a
    token reads of itself does not decay. It is left out of the sums that make the gradient of
    the decay, where it would cancel only up to rounding.
    """
    q_BCK, k_BCK, state_BVK = saved.q_BCK, saved.k_BCK, saved.state_BVK
    assert state_BVK is not None
    chunk = q_BCK.shape[1]
    d_self_BC1 = (d_out_BXV[:, :chunk] * saved.values_BCV).sum(-1, keepdim=True)
    d_gram = torch.bmm(d_out_BXV, saved.values_BCV.mT).unflatten(1, (2, chunk)).tril_(-1)
    d_reads = torch.bmm(d_out_BXV, state_BVK).unflatten(1, (2, chunk))
    d_rows, d_cols = grams_backward(d_gram, gram_operands(q_BCK, k_BCK, decay), decay)
    rise_BCK = decay.rise_BJIK.view(q_BCK.shape)
    d_q_BCK = d_reads[:, 0] * decay.from_start_BCK
    d_q_BCK.addcmul_(d_rows[:, :, 0].reshape(q_BCK.shape), rise_BCK)
    d_k_row = d_reads[:, 1] * decay.from_start_BCK
    d_k_row.addcmul_(d_rows[:, :, 1].reshape(q_BCK.shape), rise_BCK)
    d_k_col = d_cols.view(q_BCK.shape) / rise_BCK
    d_k_write = d_writes_BCK.mul_(decay.to_end_BCK)

    d_log_BCK = (d_k_row - d_k_col).mul_(k_BCK).addcmul_(q_BCK, d_q_BCK)
    d_log_BCK[:, -1] += d_total_BK
    d_g_BCK = running_sum(d_log_BCK, reverse=True)
    d_g_BCK[:, 1:] += running_sum(k_BCK * d_k_write)[:, :-1]
    d_q_BCK.addcmul_(k_BCK, d_self_BC1)
    d_k_BCK = d_k_row.add_(d_k_col).add_(d_k_write).addcmul_(q_BCK, d_self_BC1)
    return d_q_BCK, d_k_BCK, d_g_BCK


def _unit_lower_inverse(strict_BCC: Tensor) -> Tensor:
    """(I + L)^-1 by forward substitution, which stays exact where powers of L blow up.

    Only the entries below the diagonal are read.
    """
    eye = torch.eye(strict_BCC.shape[-1], dtype=strict_BCC.dtype, device=strict_BCC.device)
    return torch.linalg.solve_triangular(
        strict_BCC, eye.expand(strict_BCC.shape), upper=False, unitriangular=True
    )


def _normalize(x_BCK: Tensor) -> tuple[Tensor, Tensor]:
    rnorm_BC1 = torch.rsqrt((x_BCK * x_BCK).sum(-1, keepdim=True) + L2_EPS)
    return x_BCK * rnorm_BC1, rnorm_BC1


def _normalize_backward(d_y_BCK: Tensor, y_BCK: Tensor, rnorm_BC1: Tensor | None) -> Tensor:
    if rnorm_BC1 is None:
        return d_y_BCK
    along_BC1 = (d_y_BCK * y_BCK).sum(-1, keepdim=True)
    return torch.addcmul(d_y_BCK, y_BCK, along_BC1, value=-1).mul_(rnorm_BC1)


def _by_head(x_BCK: Tensor, per_head_HK: Tensor, op: Any) -> Tensor:
    """Combine `[B, C, K]` with a tensor `[H, K]` or `[H, 1]` of each head."""
    num_heads = per_head_HK.shape[0]
    x = x_BCK.unflatten(0, (x_BCK.shape[0] // num_heads, num_heads))
    result: Tensor = op(x, per_head_HK.to(x.dtype).unsqueeze(1))
    return result.flatten(0, 1)


def _log_decay(z_BCK: Tensor, A_log_H: Tensor, settings: Settings) -> Tensor:
    rate_H1 = A_log_H.to(z_BCK.dtype).exp().unsqueeze(1)
    if settings.lower_bound is None:
        return _by_head(F.softplus(z_BCK), -rate_H1, torch.mul)
    return _by_head(z_BCK, rate_H1, torch.mul).sigmoid_().mul_(settings.lower_bound)


def _log_decay_backward(
    d_g_BCK: Tensor, z_BCK: Tensor, A_log_H: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Gradients of z and A_log."""
    rate_H1 = A_log_H.to(z_BCK.dtype).exp().unsqueeze(1)
    if settings.lower_bound is None:
        d_rate = d_g_BCK * F.softplus(z_BCK)
        d_z = _by_head(d_g_BCK * torch.sigmoid(z_BCK), -rate_H1, torch.mul)
        d_A_BCK = _by_head(d_rate, -rate_H1, torch.mul)
    else:
        p = _by_head(z_BCK, rate_H1, torch.mul).sigmoid_()
        d_p = torch.addcmul(p, p, p, value=-1).mul_(d_g_BCK)
        d_z = _by_head(d_p, settings.lower_bound * rate_H1, torch.mul)
        d_A_BCK = d_z * z_BCK
    num_heads = A_log_H.shape[0]
    per_head = d_A_BCK.view(-1, num_heads, *d_A_BCK.shape[1:])
    return d_z, per_head.sum((0, 2, 3))
