"""The bytes of the prefix cache: one tensor of pages, and what lies where in a page (report 5.4).

A page holds `page_tokens` latent rows of every MLA layer, layer after layer. A KDA checkpoint is
the states and convolution windows of all KDA layers in one row of bytes, cut into pages. The
last page of the tensor is the null page: padded rows write there and nobody reads it.

Legend: P pages (the null page included), L tokens a page, X latent width, S rows of states, H
heads, V and K head dims, C channels, J remembered convolution inputs, N pages of a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3_core.cache.base import KDASpec, LayerSpec, state_dtype

_ALIGN = 16
"""Bytes. Kernels load vectors of this size."""


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets in bytes inside a page and inside a row of states."""

    page_tokens: int
    page_bytes: int
    row_bytes: int
    """Bytes of a row of states, a whole number of pages."""
    dtype: torch.dtype
    latents: Mapping[int, tuple[int, int]]
    """MLA layer -> (offset in a page, X)."""
    states: Mapping[int, tuple[int, int, KDASpec]]
    """KDA layer -> (offset of the state, offset of the windows, spec)."""

    @property
    def checkpoint_pages(self) -> int:
        """Pages of an extent."""
        return self.row_bytes // self.page_bytes

    @classmethod
    def of(
        cls, specs: Mapping[int, LayerSpec], page_tokens: int, dtype: torch.dtype
    ) -> ArenaLayout:
        """Lays the layers out one after the other; ValueError without an MLA or a KDA layer."""
        latents: dict[int, tuple[int, int]] = {}
        states: dict[int, tuple[int, int, KDASpec]] = {}
        page_bytes = used = 0
        for layer, spec in specs.items():
            if isinstance(spec, KDASpec):
                at = _aligned(used)
                size = spec.num_heads * spec.head_dim**2 * state_dtype(dtype).itemsize
                window = _aligned(at + size)
                used = window + spec.conv_channels * (spec.conv_width - 1) * dtype.itemsize
                states[layer] = (at, window, spec)
            else:
                latents[layer] = (page_bytes, spec.width)
                page_bytes += page_tokens * spec.width * dtype.itemsize
        if not latents or not states:
            raise ValueError(
                f"{len(latents)} MLA and {len(states)} KDA layers; the paged cache is for hybrids"
            )
        if page_bytes % _ALIGN:
            raise ValueError(
                f"a page of {page_tokens} tokens has {page_bytes} bytes, not a multiple of "
                f"{_ALIGN}; make page_tokens a multiple of 16"
            )
        row_bytes = -(-used // page_bytes) * page_bytes
        return cls(page_tokens, page_bytes, row_bytes, dtype, latents, states)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


@dataclass
class StateRows:
    """Rows of states in one byte tensor [S, row_bytes], with typed views a layer."""

    layout: ArenaLayout
    bytes_SB: Tensor
    states: dict[int, Tensor] = field(init=False)
    """[S, H, V, K], strided."""
    windows: dict[int, Tensor] = field(init=False)
    """[S, C, J], strided."""

    def __post_init__(self) -> None:
        dtype = self.layout.dtype
        self.states, self.windows = {}, {}
        for layer, (at, window, spec) in self.layout.states.items():
            state = (spec.num_heads, spec.head_dim, spec.head_dim)
            self.states[layer] = _typed(self.bytes_SB, at, state, state_dtype(dtype))
            inputs = (spec.conv_channels, spec.conv_width - 1)
            self.windows[layer] = _typed(self.bytes_SB, window, inputs, dtype)

    @classmethod
    def new(cls, layout: ArenaLayout, num_rows: int, device: torch.device | str) -> StateRows:
        """Zeroed rows."""
        shape = (num_rows, layout.row_bytes)
        return cls(layout, torch.zeros(shape, dtype=torch.uint8, device=device))


def _typed(bytes_RB: Tensor, offset: int, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A view [R, *dims] of `dtype` at a byte offset of every row."""
    count = dtype.itemsize
    for dim in dims:
        count *= dim
    return bytes_RB[:, offset : offset + count].view(dtype).unflatten(1, dims)


class Arena:
    """`num_pages` pages and the null page behind them."""

    def __init__(self, layout: ArenaLayout, num_pages: int, device: torch.device | str) -> None:
        self.layout, self.num_pages = layout, num_pages
        shape = (num_pages + 1, layout.page_bytes)
        self.bytes_PB = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.latents = {
            layer: _typed(self.bytes_PB, at, (layout.page_tokens, width), layout.dtype)
            for layer, (at, width) in layout.latents.items()
        }
        """[P, L, X] of each MLA layer, strided."""

    @property
    def null_page(self) -> int:
        """Where padded rows write."""
        return self.num_pages

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole pages (source, destination); no destination is also a source."""
        source, destination = self._index([s for s, _ in pairs]), self._index([d for _, d in pairs])
        self.bytes_PB[destination] = self.bytes_PB[source]

    def write_rows(self, extents: list[tuple[int, ...]], rows_EB: Tensor) -> None:
        """Copies rows of states into extents."""
        pages = [page for extent in extents for page in extent]
        self.write_pages(pages, rows_EB.reshape(-1, self.layout.page_bytes))

    def read_rows(self, extents: list[tuple[int, ...]]) -> Tensor:
        """Copies of the rows of states that extents hold, [E, row_bytes]."""
        pages = [page for extent in extents for page in extent]
        return self.read_pages(pages).view(len(extents), self.layout.row_bytes)

    def write_pages(self, pages: list[int], rows_NB: Tensor) -> None:
        """Copies bytes into pages."""
        self.bytes_PB[self._index(pages)] = rows_NB

    def read_pages(self, pages: list[int]) -> Tensor:
        """Copies of pages, [N, page_bytes]."""
        return self.bytes_PB[self._index(pages)]

    def _index(self, pages: list[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self.bytes_PB.device, non_blocking=True)
