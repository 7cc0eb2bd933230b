"""The index tables and the choice of segments, by enumeration (report 1.6)."""

import pytest
import torch

from k3_kernels.kda_chunk.choose import choose_segments, choose_slabs
from k3_kernels.kda_chunk.plan import make_plan

CPU = torch.device("cpu")
LENGTHS = [(1,), (0,), (), (64, 65, 0, 200), (1300, 547, 2048, 963, 271, 3063)]


def tokens_of(rows):
    return [t for first, count in rows for t in range(first, first + count)]


def rows(pieces):
    return pieces.table.tolist()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("segment_chunks", [0, 1, 3])
@pytest.mark.parametrize("num_slabs", [1, 2, 5])
def test_every_token_is_in_one_chunk_and_one_piece(lengths, segment_chunks, num_slabs):
    plan = make_plan(lengths, 64, segment_chunks, CPU, (), num_slabs)
    seen, in_pieces, finals = [], [], []
    for slab in plan.slabs:
        chunks = slab.chunks.tolist()
        assert len(chunks) == slab.num_chunks
        seen += tokens_of(chunk[:2] for chunk in chunks)
        pieces = rows(slab.pieces if slab.segments is None else slab.segments.runs)
        in_pieces += tokens_of(piece[:2] for piece in pieces)
        finals += [piece[5] for piece in pieces if piece[5] >= 0]
        counts = [piece[3] for piece in pieces]
        assert counts == sorted(counts, reverse=True)
        for first, tokens, first_chunk, num_chunks, *_ in pieces:
            own = chunks[first_chunk : first_chunk + num_chunks]
            assert sum(count for _, count, *_ in own) == tokens
            assert tokens == 0 or own[0][0] == first
    assert seen == list(range(sum(lengths)))
    assert sorted(in_pieces) == seen
    assert set(finals) == set(range(len(lengths)))
    assert len(plan.slabs) <= num_slabs


def test_a_sequence_goes_on_from_its_own_state_in_the_next_slab():
    first, second = make_plan((64, 100), 16, 0, CPU, (), 2).slabs
    assert not first.has_carry and second.has_carry
    assert sorted(row[4:] for row in rows(first.pieces)) == [[0, 0], [1, 1]]
    assert [row[4:] for row in rows(second.pieces)] == [[-2, 1]]


def test_segments_of_a_sequence_follow_each_other():
    (slab,) = make_plan((64, 0, 300), 16, 4, CPU).slabs
    assert slab.segments.parts.tolist() == [[0, 0], [1, 1], [2, 2], [7, 0]]
    runs = sorted(rows(slab.segments.runs), key=lambda row: row[4])
    assert [row[4] for row in runs] == list(range(7))
    assert [row[5] for row in runs] == [0, 1, -1, -1, -1, -1, 2]
    assert sorted(row[4] for row in rows(slab.segments.maps)) == [2, 3, 4, 5]


def test_chunks_end_where_states_are_exported():
    exports = ((16, 20), (), (33,))
    plan = make_plan((40, 0, 33), 16, 0, CPU, exports)
    assert plan.num_exports == 3
    (slab,) = plan.slabs
    expected = [[0, 16, 0, 1], [16, 4, 1, 1], [20, 16, -1, 2], [36, 4, -1, 1]]
    assert slab.chunks.tolist() == [*expected, [40, 16, -1, 3], [56, 16, -1, 2], [72, 1, 2, 1]]


def test_full_cards_are_not_cut_and_idle_ones_are():
    assert choose_segments((8192,), 32, 96, 2, 132) == 0
    assert choose_segments((1024,) * 8, 32, 96, 2, 132) == 0
    assert 0 < choose_segments((8192,), 32, 24, 2, 132) <= 86
    assert 0 < choose_segments((65536,), 32, 2, 2, 132) <= 128
    assert choose_segments((32,), 32, 1, 2, 132) == 0
    assert choose_segments((), 32, 1, 2, 132) == 0


@pytest.mark.parametrize(
    "heads, tokens, slabs, segments",
    [(2, 8192, 1, 8), (8, 8192, 1, 8), (24, 8192, 1, 5), (24, 65536, 2, 5), (48, 8192, 1, 1)],
)
def test_the_cut_is_the_one_that_measured_fastest_on_an_h200(heads, tokens, slabs, segments):
    """docs/kernels.md; values in two blocks, 132 multiprocessors."""
    chunks = tokens // 32 // slabs
    steps = choose_segments((tokens,), 32, heads, 2, 132, slabs)
    assert (-(-chunks // steps) if steps else 1) == segments


def test_slabs_are_cut_where_prep_still_fills_the_card():
    assert choose_slabs((8192,), 32, 96, 132) == 1
    assert choose_slabs((65536,), 32, 96, 132) == 8
    assert choose_slabs((), 32, 96, 132) == 1
