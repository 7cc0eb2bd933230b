"""The index tables and the choice of segments, by enumeration (report 1.6)."""

import pytest
import torch

from k3_kernels.kda_chunk.plan import choose_segments, make_plan

CPU = torch.device("cpu")
LENGTHS = [(1,), (0,), (), (64, 65, 0, 200), (1300, 547, 2048, 963, 271, 3063)]


def tokens_of(rows):
    return [t for first, count in rows for t in range(first, first + count)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("segment_chunks", [0, 1, 3])
def test_every_token_is_in_one_chunk_and_one_piece(lengths, segment_chunks):
    plan = make_plan(lengths, 64, segment_chunks, CPU)
    everything = list(range(sum(lengths)))
    chunks = plan.chunks.tolist()
    assert tokens_of(chunks) == everything
    assert len(chunks) == plan.num_chunks
    pieces = (plan.sequences if plan.segments is None else plan.segments.runs).table.tolist()
    assert sorted(tokens_of(piece[:2] for piece in pieces)) == everything
    assert [piece[1] for piece in pieces] == sorted((piece[1] for piece in pieces), reverse=True)
    for first, count, first_chunk, _, _ in pieces:
        assert count == 0 or chunks[first_chunk][0] == first


def test_segments_of_a_sequence_follow_each_other():
    plan = make_plan((64, 0, 300), 16, 4, CPU)
    assert plan.segments.first.flatten().tolist() == [0, 1, 2, 7]
    runs = sorted(plan.segments.runs.table.tolist(), key=lambda row: row[3])
    assert [row[3] for row in runs] == list(range(7))
    assert [row[4] for row in runs] == [0, 1, -1, -1, -1, -1, 2]
    maps = sorted(row[3] for row in plan.segments.maps.table.tolist())
    assert maps == [2, 3, 4, 5]


def test_full_cards_are_not_cut_and_idle_ones_are():
    assert choose_segments((8192,), 64, 96, 1, 132) == 0
    assert choose_segments((1024,) * 8, 64, 96, 1, 132) == 0
    cut = choose_segments((65536,), 64, 2, 1, 132)
    assert 0 < cut <= 512
    assert choose_segments((64,), 64, 1, 1, 132) == 0
    assert choose_segments((), 64, 1, 1, 132) == 0
