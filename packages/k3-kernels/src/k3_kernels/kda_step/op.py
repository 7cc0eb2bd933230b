"""kda_step on Triton: one launch, no host synchronisation on a GPU.

A GPU cannot be asked for its slots without waiting for it, so slots and commit counts are checked
only for CPU tensors (interpreted kernels). On a GPU a slot outside the pool touches no state and
gives a row of zeros, as slot -1 does, and a commit count outside 1..W commits nothing; both are the
caller's errors, contained. Two rows of one slot race.
Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_core.ops.kda_step.inputs import check_writes, live_rows, token_counts
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_step.config import StepBlocks, choose_step_blocks
from k3_kernels.kda_step.step import step_kernel
from k3_kernels.launch import last_contiguous


def check_pool(
    op: str,
    state_SHVK: Tensor,
    slots_B: Tensor,
    counts: tuple[str, Tensor | None],
    lead: tuple[int, int],
) -> None:
    """Raise for a pool, slots or token counts that do not fit; values only on the CPU.

    counts: the name and the tensor of tokens a row; lead: rows and tokens of the call.
    """
    if state_SHVK.stride(-1) != 1 or state_SHVK.stride(-2) != state_SHVK.shape[-1]:
        raise ValueError(
            f"{op}: each [V, K] state of the pool must be contiguous, got strides "
            f"{state_SHVK.stride()}; slots and heads may have any stride"
        )
    name, count_B = counts
    for what, x in (("slots", slots_B), (name, count_B)):
        if x is not None and (
            tuple(x.shape) != lead[:1] or x.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{op}: {what} must be int32 or int64 [{lead[0]}], got {x.dtype} {list(x.shape)}"
            )
    if slots_B.device.type == "cpu":
        live_rows(op, slots_B, lead[0], state_SHVK.shape[0])
        token_counts(op, name, count_B, *lead)


def check_records(
    op: str, writes_BWHV: Tensor, v_BWHV: Tensor, num_commit_B: Tensor | None
) -> None:
    """Raise for writes that do not fit, or for a verify step that is asked to commit."""
    check_writes(op, writes_BWHV, tuple(v_BWHV.shape), torch.float32, v_BWHV.device)
    if writes_BWHV.stride(-1) != 1:
        raise ValueError(f"{op}: the writes of a head must be contiguous: {writes_BWHV.stride()}")
    if num_commit_B is not None:
        raise ValueError(f"{op}: writes makes a verify step, which takes no num_commit")


@custom_op("kda_step.triton", is_differentiable=False)
@torch.no_grad()
def kda_step(
    q_BWHK: Tensor,
    k_BWHK: Tensor,
    v_BWHV: Tensor,
    gate_BWHK: Tensor,
    beta_BWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Tensor,
    slots_B: Tensor,
    lower_bound: float | None,
    scale: float | None = None,
    num_commit_B: Tensor | None = None,
    writes_BWHV: Tensor | None = None,
    blocks: StepBlocks | None = None,
) -> Tensor:
    """Decode W tokens a row on pooled states; arguments as `k3_core.ops.kda_step.KdaStep`.

    `blocks` replaces what the table would choose.
    """
    args = (q_BWHK, k_BWHK, v_BWHV, gate_BWHK, beta_BWH, A_log_H, dt_bias_HK)
    check_inputs("kda_step", *args, lower_bound)
    bound = check_bound("kda_step", lower_bound)
    default_precision("kda_step", q_BWHK.dtype)
    (num_rows, num_tokens, num_heads, num_k), num_v = q_BWHK.shape, v_BWHV.shape[-1]
    pool_shape = (state_SHVK.shape[0], num_heads, num_v, num_k)
    check_state("kda_step", "state", state_SHVK, pool_shape, q_BWHK)
    counts = ("num_commit", num_commit_B)
    check_pool("kda_step", state_SHVK, slots_B, counts, (num_rows, num_tokens))
    if writes_BWHV is not None:
        check_records("kda_step", writes_BWHV, v_BWHV, num_commit_B)
    o_BWHV = torch.empty(v_BWHV.shape, dtype=v_BWHV.dtype, device=v_BWHV.device)
    if o_BWHV.numel() == 0:
        return o_BWHV
    blocks = blocks or choose_step_blocks(num_k, num_v, num_rows * num_heads)
    num_blocks = -(-num_v // blocks.values)
    inputs = [last_contiguous(x) for x in (q_BWHK, k_BWHK, v_BWHV, gate_BWHK)]
    commit = slots_B if num_commit_B is None else num_commit_B
    writes = o_BWHV if writes_BWHV is None else writes_BWHV
    step_kernel[(num_rows * num_heads * num_blocks,)](
        *inputs,
        beta_BWH,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        o_BWHV,
        state_SHVK,
        slots_B,
        commit,
        writes,
        num_heads,
        state_SHVK.shape[0],
        num_tokens,
        bound,
        num_k**-0.5 if scale is None else scale,
        *(s for x in (*inputs, beta_BWH, writes) for s in x.stride()[:3]),
        *state_SHVK.stride()[:2],
        slots_B.stride(0),
        commit.stride(0),
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.values,
        NUM_BLOCKS=num_blocks,
        HAS_COMMIT=num_commit_B is not None,
        HAS_WRITES=writes_BWHV is not None,
        num_warps=blocks.warps,
    )
    return o_BWHV
