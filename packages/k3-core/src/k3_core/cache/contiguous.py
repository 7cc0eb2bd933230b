"""Contiguous hybrid cache: a slot a sequence, latent rows in one growing buffer a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.cache.base import KDASpec, LayerSpec, state_dtype

if TYPE_CHECKING:
    from k3_core.model.batch import SequenceBatch

_FIRST_LENGTH = 256


class ContiguousCache:
    """Simple generation's cache; satisfies `k3_core.cache.base.Cache`.

    `max_length=None` lets the latent buffers grow by doubling; a number fixes their size, and
    writing beyond it is an error.
    """

    def __init__(
        self,
        specs: Mapping[int, LayerSpec],
        num_slots: int,
        *,
        max_length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"a cache needs at least one slot, got {num_slots}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length {max_length} is not None and not at least 1 token")
        self.lengths = [0] * num_slots
        self.max_length = max_length
        self._states: dict[int, Tensor] = {}
        self._convs: dict[int, Tensor] = {}
        self._latents: dict[int, Tensor] = {}
        for layer, spec in specs.items():
            if isinstance(spec, KDASpec):
                h, d = spec.num_heads, spec.head_dim
                conv_shape = (num_slots, spec.conv_channels, spec.conv_width - 1)
                self._states[layer] = torch.zeros(
                    (num_slots, h, d, d), dtype=state_dtype(dtype), device=device
                )
                self._convs[layer] = torch.zeros(conv_shape, dtype=dtype, device=device)
            else:
                shape = (num_slots, max_length or _FIRST_LENGTH, spec.width)
                self._latents[layer] = torch.zeros(shape, dtype=dtype, device=device)

    def kda_state(self, layer: int) -> Tensor:
        """Recurrent states [S, H, V, K]."""
        return self._states[layer]

    def conv_state(self, layer: int) -> Tensor:
        """Convolution inputs [S, C, W-1]."""
        return self._convs[layer]

    def append_latent(self, layer: int, batch: SequenceBatch, latent_TX: Tensor) -> None:
        """Store latent rows; raises ValueError beyond `max_length`."""
        buffer = self._room(layer, max(batch.total_lengths, default=0))
        rows = latent_TX.split(batch.seqlens)
        for slot, start, new in zip(batch.slots, batch.starts, rows, strict=True):
            buffer[slot, start : start + len(new)] = new

    def latent_pages(self, layer: int, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Each slot is one page as long as the buffer; raises ValueError beyond `max_length`."""
        buffer = self._room(layer, max(batch.total_lengths, default=0))
        return buffer, batch.slots_N[:, None]

    def check_room(self, lengths: tuple[int, ...]) -> None:
        """Raise ValueError when a sequence is longer than `max_length`."""
        longest = max(lengths, default=0)
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit the cache of max_length "
                f"{self.max_length}; make the cache longer or the request shorter"
            )

    def advance(self, slots: tuple[int, ...], seqlens: tuple[int, ...]) -> None:
        """Add the new tokens of each slot to its length."""
        for slot, length in zip(slots, seqlens, strict=True):
            self.lengths[slot] += length

    def reset(self, slot: int) -> None:
        """Zero the slot's states and forget its rows."""
        self.lengths[slot] = 0
        for state in (*self._states.values(), *self._convs.values()):
            state[slot] = 0

    def _room(self, layer: int, needed: int) -> Tensor:
        buffer = self._latents[layer]
        if needed <= buffer.shape[1]:
            return buffer
        self.check_room((needed,))
        length = max(needed, 2 * buffer.shape[1])
        grown = buffer.new_zeros(buffer.shape[0], length, buffer.shape[2])
        grown[:, : buffer.shape[1]] = buffer
        self._latents[layer] = grown
        return grown
