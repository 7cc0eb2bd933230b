"""What the model sees of the paged cache: running states in slots, latents in pages (report 5.4).

Kernels update the running states in place, so these lie in dense slots outside the arena;
checkpoints are copies of them, in extents. The last slot is the null slot of padded rows.

Legend: S slots (the null slot included), T tokens, N sequences, P pages of L tokens, M pages a
sequence, X latent width, H heads, V and K head dims, C channels, J remembered inputs, E
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from k3_core.model.batch import PADDED, SequenceBatch
from k3_serve.cache.arena import Arena, ArenaLayout, StateRows


class StagedCheckpoints:
    """States that a forward takes at offsets of its sequences, on their way to the arena.

    Satisfies `k3_core.model.batch.Checkpoints`.
    """

    def __init__(
        self, layout: ArenaLayout, offsets: tuple[tuple[int, ...], ...], device: torch.device
    ) -> None:
        self.offsets = offsets
        self.rows = StateRows.new(layout, sum(map(len, offsets)), device)

    def put(self, layer: int, states_EHVK: Tensor, windows_ECJ: Tensor) -> None:
        """Keeps one layer's states."""
        self.rows.states[layer].copy_(states_EHVK)
        self.rows.windows[layer].copy_(windows_ECJ)


class PagedCache:
    """Satisfies `k3_core.cache.base.Cache` over an arena, with `num_slots` running sequences."""

    def __init__(self, arena: Arena, num_slots: int, max_length: int) -> None:
        self.arena = arena
        self.lengths = [0] * num_slots
        self._max_length = max_length
        self._page_tokens = arena.layout.page_tokens
        device = arena.bytes_PB.device
        self.rows = StateRows.new(arena.layout, num_slots + 1, device)
        num_columns = -(-max_length // self._page_tokens)
        shape = (num_slots + 1, num_columns)
        self._table_SM = torch.full(shape, arena.null_page, dtype=torch.int64, device=device)
        self._num_listed = [0] * num_slots

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._page_tokens

    @property
    def num_columns(self) -> int:
        """Pages of the longest sequence."""
        return self._table_SM.shape[1]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.arena.bytes_PB.device

    # What the model calls.

    def kda_state(self, layer: int) -> Tensor:
        """Running states [S, H, V, K]."""
        return self.rows.states[layer]

    def conv_state(self, layer: int) -> Tensor:
        """Convolution inputs [S, C, J]."""
        return self.rows.windows[layer]

    def append_latent(self, layer: int, batch: SequenceBatch, latent_TX: Tensor) -> None:
        """Scatters the batch's latent rows into the pages of their sequences."""
        pages_PLX = self.arena.latents[layer]
        pages_PLX[self._places(batch)] = latent_TX.to(pages_PLX.dtype)

    def latent_pages(self, layer: int, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """The layer's view of all pages and the table of the batch's sequences."""
        return self.arena.latents[layer], self._tables(batch)

    def _places(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Page [T] and place in it [T] of each token."""
        if "places" not in batch.found:
            columns_T = batch.positions_T // self._page_tokens
            page_T = self._table_SM[batch.slots_T, columns_T]
            batch.found["places"] = page_T, batch.positions_T % self._page_tokens
        places: tuple[Tensor, Tensor] = batch.found["places"]
        return places

    def _tables(self, batch: SequenceBatch) -> Tensor:
        """Pages of each sequence, [N, M]."""
        if "tables" not in batch.found:
            num_columns = -(-max(batch.total_lengths, default=0) // self._page_tokens)
            batch.found["tables"] = self._table_SM[batch.slots_N, :num_columns]
        tables_NM: Tensor = batch.found["tables"]
        return tables_NM

    def check_room(self, lengths: tuple[int, ...]) -> None:
        """Raise ValueError when a sequence is longer than the page table."""
        longest = max(lengths, default=0)
        if longest > self._max_length:
            raise ValueError(f"a sequence of {longest} tokens; the longest is {self._max_length}")

    def advance(self, slots: tuple[int, ...], seqlens: tuple[int, ...]) -> None:
        """Add the new tokens of each slot to its length."""
        for slot, count in zip(slots, seqlens, strict=True):
            if slot != PADDED:
                self.lengths[slot] += count

    def reset(self, slot: int) -> None:
        """An empty sequence in the slot."""
        self.rows.bytes_SB[slot] = 0
        self.lengths[slot] = self._num_listed[slot] = 0

    # What the runner calls around a forward.

    def restore(self, items: Sequence[tuple[int, tuple[int, ...], int]]) -> None:
        """Copies checkpoints into slots: (slot, extent, tokens of its prefix)."""
        slots = torch.tensor([slot for slot, _, _ in items]).to(self.device, non_blocking=True)
        self.rows.bytes_SB[slots] = self.arena.read_rows([extent for _, extent, _ in items])
        for slot, _, num_tokens in items:
            self.lengths[slot], self._num_listed[slot] = num_tokens, 0

    def save(self, items: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Copies the states of slots into extents."""
        slots = torch.tensor([slot for slot, _ in items]).to(self.device, non_blocking=True)
        self.arena.write_rows([extent for _, extent in items], self.rows.bytes_SB[slots])

    def store(self, staged: StagedCheckpoints, extents: list[tuple[int, ...]]) -> None:
        """Copies the states that a forward took into extents, in the order of its offsets."""
        self.arena.write_rows(extents, staged.rows.bytes_SB)

    def list_pages(self, tables: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Enters the pages of slots; a slot's pages so far are a prefix of the ones given."""
        slots: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for slot, held in tables:
            first = self._num_listed[slot]
            slots += [slot] * (len(held) - first)
            columns += range(first, len(held))
            pages += held[first:]
            self._num_listed[slot] = len(held)
        if pages:
            entries = torch.tensor([slots, columns, pages]).to(self.device, non_blocking=True)
            self._table_SM[entries[0], entries[1]] = entries[2]
