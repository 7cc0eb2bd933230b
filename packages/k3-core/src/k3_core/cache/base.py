"""What a layer asks of a cache, and what a cache offers to a layer (design 4).

KDA keeps a recurrent state and the last inputs of its convolution; Gated MLA keeps one latent
row a token.

T tokens, N sequences, S slots, P pages of L tokens, M pages a sequence, H heads, V and K head
dims, C channels, X = kv latent + shared key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3_core.model.batch import SequenceBatch


@dataclass(frozen=True)
class KDASpec:
    """Cache of one KDA layer, of a size that does not depend on the length."""

    num_heads: int
    head_dim: int
    conv_channels: int
    conv_width: int


@dataclass(frozen=True)
class MLASpec:
    """Cache of one Gated MLA layer: `width` values a token."""

    width: int


LayerSpec = KDASpec | MLASpec


class Cache(Protocol):
    """Per-sequence slots over all layers of a model. Layers are addressed by 0-based index."""

    lengths: list[int]
    """Tokens held by each slot."""

    def kda_state(self, layer: int) -> Tensor:
        """Recurrent states [S, H, V, K] (float32), written in place by the layer."""
        ...

    def conv_state(self, layer: int) -> Tensor:
        """Last inputs of the convolutions [S, C, W-1], oldest first, written in place."""
        ...

    def append_latent(self, layer: int, batch: SequenceBatch, latent_TX: Tensor) -> None:
        """Store the latent rows of the batch's tokens, from position `starts[i]` on."""
        ...

    def latent_pages(self, layer: int, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Pages [P, L, X] and the page table [N, M] of the batch's sequences.

        There is room for the batch's total lengths, and M covers them at least; entries behind a
        sequence's own pages name any page.
        """
        ...

    def check_room(self, lengths: tuple[int, ...]) -> None:
        """Raise ValueError when sequences of these total lengths do not fit; writes nothing."""
        ...

    def advance(self, slots: tuple[int, ...], seqlens: tuple[int, ...]) -> None:
        """Count tokens that a forward pass has added to its slots."""
        ...

    def reset(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Recurrent states are float32 whatever the activations are; float64 models keep float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
