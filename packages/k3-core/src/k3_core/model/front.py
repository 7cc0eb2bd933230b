"""From padded [B, T] input to a packed batch and back. T tokens, B rows, P packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a [B, T] batch are."""

    mask_BT: Tensor
    """Boolean, true at real tokens."""

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return tuple(self.mask_BT.sum(1).tolist())

    def pack(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [P, ...]."""
        return x_BT[self.mask_BT]

    def unpack(self, x_P: Tensor) -> Tensor:
        """[P, ...] -> [B, T, ...], zeros at padding."""
        out = x_P.new_zeros(*self.mask_BT.shape, *x_P.shape[1:])
        out[self.mask_BT] = x_P
        return out


def packing_of(input_ids_BT: Tensor, attention_mask: Tensor | None) -> Packing:
    """The packing of a batch; a mask longer than the input covers cached tokens too.

    Raises ValueError when the shapes do not fit.
    """
    if input_ids_BT.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], got {tuple(input_ids_BT.shape)}")
    if attention_mask is None:
        return Packing(torch.ones_like(input_ids_BT, dtype=torch.bool))
    num_rows, length = input_ids_BT.shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != num_rows:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} does not fit input_ids "
            f"{tuple(input_ids_BT.shape)}; it is [B, T], or [B, cached + T]"
        )
    if attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} positions, input_ids has {length}"
        )
    return Packing(attention_mask[:, attention_mask.shape[1] - length :].to(torch.bool))
