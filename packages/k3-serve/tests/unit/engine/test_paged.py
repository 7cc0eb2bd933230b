"""Bytes of the arena: where latents and states lie, and that copies are exact."""

import pytest
import torch

from k3_core.cache.base import KDASpec, MLASpec
from k3_core.model import SequenceBatch
from k3_serve.cache.arena import Arena, ArenaLayout, StateRows
from k3_serve.engine.paged import PagedCache

SPECS = {0: KDASpec(2, 4, 24, 4), 1: MLASpec(6), 2: KDASpec(2, 4, 24, 4), 3: MLASpec(6)}


def new_cache(dtype=torch.float32, num_pages=40):
    layout = ArenaLayout.of(SPECS, 8, dtype)
    return PagedCache(Arena(layout, num_pages, "cpu"), 3, 64)


@pytest.mark.parametrize(
    ("dtype", "page", "row"),
    [
        (torch.float32, 2 * 8 * 6 * 4, 2 * (2 * 4 * 4 * 4 + 24 * 3 * 4)),
        (torch.bfloat16, 2 * 8 * 6 * 2, 2 * (2 * 4 * 4 * 4 + 24 * 3 * 2)),
        (torch.float64, 2 * 8 * 6 * 8, 2 * (2 * 4 * 4 * 8 + 24 * 3 * 8)),
    ],
)
def test_bytes_of_a_page_and_of_a_checkpoint(dtype, page, row):
    layout = ArenaLayout.of(SPECS, 8, dtype)
    assert layout.page_bytes == page
    assert layout.checkpoint_pages == -(-row // page)
    assert layout.row_bytes == layout.checkpoint_pages * page


def test_layers_do_not_overlap_and_cover_the_page():
    cache = new_cache()
    arena, rows = cache.arena, cache.rows
    for value, layer in enumerate((1, 3), 1):
        arena.latents[layer].fill_(value)
    words = arena.bytes_PB[5].view(torch.float32)
    assert words.tolist() == [1.0] * 48 + [2.0] * 48
    for value, layer in enumerate((0, 2), 1):
        rows.states[layer].fill_(value)
        rows.windows[layer].fill_(-value)
    used = rows.bytes_SB[1].view(torch.float32)
    assert [int((used == v).sum()) for v in (1, -1, 2, -2)] == [32, 72, 32, 72]


def test_latents_land_in_their_pages_and_padding_in_the_null_page():
    cache = new_cache()
    cache.arena.bytes_PB.fill_(0)
    cache.list_pages([(0, [7, 3]), (2, [9])])
    cache.lengths[:] = [6, 0, 0]
    batch = SequenceBatch.from_lengths(
        [1, 1, 4, 3], cache=cache, slots=[-1, -1, 0, 2], starts=[0, 5, 6, 0]
    )
    latent_TX = torch.arange(1, 10)[:, None].float().expand(9, 6)
    cache.append_latent(3, batch, latent_TX)
    pages, table = cache.latent_pages(3, batch)
    assert table.tolist() == [[40, 40], [40, 40], [7, 3], [9, 40]]
    assert pages[7, :, 0].tolist() == [0] * 6 + [3, 4]
    assert pages[3, :, 0].tolist() == [5, 6] + [0] * 6
    assert pages[9, :, 0].tolist() == [7, 8, 9] + [0] * 5
    assert pages[40, :, 0].tolist() == [1, 0, 0, 0, 0, 2, 0, 0]
    assert not cache.arena.latents[1].any()
    cache.advance(batch.slots, batch.seqlens)
    assert cache.lengths == [10, 0, 3]


def test_tables_grow_and_begin_anew():
    cache = new_cache()
    cache.list_pages([(1, [4])])
    cache.list_pages([(1, [4, 8, 2])])
    batch = SequenceBatch.from_lengths([24], cache=cache, slots=[1])
    assert cache.latent_pages(1, batch)[1].tolist() == [[4, 8, 2]]
    cache.reset(1)
    cache.list_pages([(1, [6])])
    short = SequenceBatch.from_lengths([2], cache=cache, slots=[1])
    assert cache.latent_pages(1, short)[1].tolist() == [[6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_survives_its_extent(dtype):
    cache = new_cache(dtype)
    size = cache.arena.layout.checkpoint_pages
    extents = [tuple(range(1, 1 + size)), tuple(range(39, 39 - size, -1))]
    generator = torch.Generator().manual_seed(0)
    for layer in (0, 2):
        cache.kda_state(layer).normal_(generator=generator)
        cache.conv_state(layer).normal_(generator=generator)
    kept = [cache.rows.bytes_SB[slot].clone() for slot in (0, 2)]
    cache.save([(0, extents[0]), (2, extents[1])])
    cache.rows.bytes_SB.fill_(0xFF)
    cache.restore([(1, extents[1], 8), (2, extents[0], 16)])
    assert torch.equal(cache.rows.bytes_SB[1], kept[1])
    assert torch.equal(cache.rows.bytes_SB[2], kept[0])
    assert cache.lengths == [0, 8, 16]
    assert (cache.rows.bytes_SB[3] == 0xFF).all(), "the null slot is left alone"


def test_page_copies_read_before_they_write():
    cache = new_cache()
    pages = cache.arena.latents[1]
    pages[3], pages[5] = 3.0, 5.0
    cache.arena.copy_pages([(3, 8), (5, 9)])
    assert (pages[8] == 3).all() and (pages[9] == 5).all()


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(ValueError, match="0 MLA and 1 KDA"):
        ArenaLayout.of({0: SPECS[0]}, 8, torch.float32)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        ArenaLayout.of({0: SPECS[0], 1: MLASpec(5)}, 2, torch.bfloat16)
    with pytest.raises(ValueError, match="65 tokens; the longest is 64"):
        new_cache().check_room((65,))


def test_new_rows_are_zero():
    rows = StateRows.new(ArenaLayout.of(SPECS, 8, torch.float32), 2, "cpu")
    assert not rows.bytes_SB.any() and rows.states[0].shape == (2, 2, 4, 4)
