"""What the decoder asks of an attention layer; a plugin's layer has the same constructor."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from k3_core.cache.base import LayerSpec
from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.ops import OpSet


class Attention(Protocol):
    """An nn.Module; its parameters carry the released names below `self_attn.`.

    One of softmax may have what QK-Clip needs, as `GatedMLA` has it: `num_heads`, `observer` and
    `scale_scores`.
    """

    ops: OpSet

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

    def __call__(self, x_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """Normed layer input [T, D] -> [T, D]; reads and writes the batch's cache.

        Of a verify batch it leaves the recurrent states of decoding sequences as they are, and
        appends to `batch.replays` what moves them.
        """
        ...

    def cache_spec(self) -> LayerSpec:
        """What a cache has to keep for this layer."""
        ...
