"""Checks of kda_step, of which kda_replay shares those of slots and token counts (report 1.8).

Legend: B rows of the batch, S slots, H heads, K key, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_core.ops.math import math_dtype

StepArgs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, gate, beta, A_log and dt_bias of a call of kda_step."""


def live_rows(op: str, slots_B: Tensor, num_rows: int, num_slots: int) -> list[int]:
    """Rows whose slot is not -1; one read of the slots on the host checks them all."""
    if tuple(slots_B.shape) != (num_rows,) or slots_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: slots must be int32 or int64 [{num_rows}], got {slots_B.dtype} "
            f"{list(slots_B.shape)}"
        )
    slots = slots_B.tolist()
    for slot in slots:
        if not -1 <= slot < num_slots:
            raise IndexError(
                f"{op}: slot {slot} is outside the pool of {num_slots}; "
                "use 0 to the pool size - 1, or -1 for a padded row"
            )
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    if len({slots[row] for row in rows}) != len(rows):
        raise ValueError(f"{op}: a slot is used by two rows: {slots}")
    return rows


def token_counts(
    op: str, name: str, count_B: Tensor | None, num_rows: int, num_tokens: int
) -> list[int]:
    """Tokens of each row, all of them for None; raises ValueError outside 0..num_tokens."""
    if count_B is None:
        return [num_tokens] * num_rows
    if tuple(count_B.shape) != (num_rows,) or count_B.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be an integer tensor [{num_rows}], got "
            f"{count_B.dtype} {list(count_B.shape)}"
        )
    counts: list[int] = count_B.tolist()
    for count in counts:
        if not 0 <= count <= num_tokens:
            raise ValueError(f"{op}: {name} {count} is outside 0..{num_tokens}")
    return counts


def check_writes(
    op: str, writes_BWHV: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless the recorded writes fit v's `shape` in the compute dtype."""
    if tuple(writes_BWHV.shape) != shape:
        raise ValueError(
            f"{op}: writes has shape {list(writes_BWHV.shape)}, expected {list(shape)}"
        )
    if writes_BWHV.dtype != dtype or writes_BWHV.device != device:
        raise TypeError(
            f"{op}: writes is {writes_BWHV.dtype} on {writes_BWHV.device}, expected {dtype} on "
            f"{device}"
        )


def check_step(
    args: StepArgs,
    state_SHVK: Tensor,
    slots_B: Tensor,
    lower_bound: float | None,
    num_commit_B: Tensor | None,
    writes_BWHV: Tensor | None,
) -> tuple[list[int], list[int]]:
    """Check a call of kda_step; returns its live rows and the tokens each row commits.

    Raises as `k3_core.ops.kda_step.KdaStep` says.
    """
    check_inputs("kda_step", *args, lower_bound)
    q_BWHK, _, v_BWHV = args[:3]
    num_rows, num_tokens, num_heads, num_k = q_BWHK.shape
    num_slots = state_SHVK.shape[0]
    shape = (num_slots, num_heads, v_BWHV.shape[-1], num_k)
    check_state("kda_step", "state", state_SHVK, shape, q_BWHK)
    rows = live_rows("kda_step", slots_B, num_rows, num_slots)
    if writes_BWHV is None:
        return rows, token_counts("kda_step", "num_commit", num_commit_B, num_rows, num_tokens)
    check_writes("kda_step", writes_BWHV, v_BWHV.shape, math_dtype(q_BWHK), v_BWHV.device)
    if num_commit_B is not None:
        raise ValueError("kda_step: writes makes a verify step, which takes no num_commit")
    return rows, [0] * num_rows
