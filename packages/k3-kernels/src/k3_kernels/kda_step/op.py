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

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_step.config import StepBlocks, choose_step_blocks
from k3_kernels.kda_step.step import step_kernel
from k3_kernels.launch import last_contiguous


def check_pool(
    op: str,
    state_SHVK: Tensor,
    slots_B: Tensor,
    num_commit_B: Tensor | None,
    rows: int,
    tokens: int,
) -> None:
    """Raise for a pool, slots or commit counts that do not fit; values only on the CPU."""
    if state_SHVK.stride(-1) != 1 or state_SHVK.stride(-2) != state_SHVK.shape[-1]:
        raise ValueError(
            f"{op}: each [V, K] state of the pool must be contiguous, got strides "
            f"{state_SHVK.stride()}; slots and heads may have any stride"
        )
    if tuple(slots_B.shape) != (rows,) or slots_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: slots must be int32 or int64 [{rows}], got {slots_B.dtype} "
            f"{list(slots_B.shape)}"
        )
    if num_commit_B is not None and (
        tuple(num_commit_B.shape) != (rows,) or num_commit_B.is_floating_point()
    ):
        raise ValueError(
            f"{op}: num_commit must be an integer tensor [{rows}], got {num_commit_B.dtype} "
            f"{list(num_commit_B.shape)}"
        )
    if slots_B.device.type != "cpu":
        return
    slots, num_slots = slots_B.tolist(), state_SHVK.shape[0]
    for slot in slots:
        if not -1 <= slot < num_slots:
            raise IndexError(
                f"{op}: slot {slot} is outside the pool of {num_slots}; "
                "use 0 to the pool size - 1, or -1 for a padded row"
            )
    live = [slot for slot in slots if slot >= 0]
    if len(set(live)) != len(live):
        raise ValueError(f"{op}: a slot is used by two rows: {slots}")
    for count in [] if num_commit_B is None else num_commit_B.tolist():
        if not 0 <= count <= tokens:
            raise ValueError(f"{op}: num_commit {count} is outside 0..{tokens}")


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
    check_pool("kda_step", state_SHVK, slots_B, num_commit_B, num_rows, num_tokens)
    o_BWHV = torch.empty(v_BWHV.shape, dtype=v_BWHV.dtype, device=v_BWHV.device)
    if o_BWHV.numel() == 0:
        return o_BWHV
    blocks = blocks or choose_step_blocks(num_k, num_v, num_rows * num_heads)
    num_blocks = -(-num_v // blocks.values)
    inputs = [last_contiguous(x) for x in (q_BWHK, k_BWHK, v_BWHV, gate_BWHK)]
    commit = slots_B if num_commit_B is None else num_commit_B
    step_kernel[(num_rows * num_heads * num_blocks,)](
        *inputs,
        beta_BWH,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        o_BWHV,
        state_SHVK,
        slots_B,
        commit,
        num_heads,
        state_SHVK.shape[0],
        num_tokens,
        bound,
        num_k**-0.5 if scale is None else scale,
        *(s for x in (*inputs, beta_BWH) for s in x.stride()[:3]),
        *state_SHVK.stride()[:2],
        slots_B.stride(0),
        commit.stride(0),
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.values,
        NUM_BLOCKS=num_blocks,
        HAS_COMMIT=num_commit_B is not None,
        num_warps=blocks.warps,
    )
    return o_BWHV
