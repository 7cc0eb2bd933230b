"""The forgetting bound that lets the maps of segments begin late (report 1.6, 1.7)."""

from dataclasses import replace

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk as recurrence
from k3_core.ops.kda_segment.reference import kda_segment as exact_maps
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_chunk.config import IEEE, Blocks
from k3_kernels.kda_chunk.launch import Gates, run_maps, run_prep
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.kda_chunk.plan import make_plan
from k3_kernels.kda_chunk.workspace import make_tiles

TOKENS, HEADS, DIM, BOUND = 150, 2, 16, -5.0
BLOCKS = Blocks(16, 16, scan_stages=1, prep_stages=1)
FAST, MEDIUM, SLOW = 1.0, -0.5, -6.5
WHOLE = replace(IEEE, forget=None)


def draw(device, gate):
    v = Values(torch.float32, device)
    args = [v.act(TOKENS, HEADS, DIM) for _ in range(3)]
    args += [v.act(TOKENS, HEADS, DIM) + gate, v.act(TOKENS, HEADS)]
    return [*args, v.full(HEADS, scale=0.3), v.full(HEADS, DIM, scale=0.5)]


def prepared(args, segment_chunks, precision=IEEE):
    """The slab and its tiles."""
    q, k, _, gate, beta, A_log, dt_bias = args
    (slab,) = make_plan((TOKENS,), BLOCKS.chunk, segment_chunks, q.device).slabs
    tiles = make_tiles(q.device, HEADS, DIM, slab.num_chunks, True, BLOCKS, IEEE)
    run_prep(q, k, Gates(gate, beta, A_log, dt_bias, BOUND), 1.0, slab, tiles, BLOCKS, precision)
    return slab, tiles


@pytest.mark.parametrize("gate", [FAST, MEDIUM, SLOW])
def test_no_chunk_leaves_more_of_a_state_than_its_bound(gate, device):
    args = draw(device, gate)
    slab, tiles = prepared(args, 2)
    ends = [0, *(first + count for first, count, *_ in slab.chunks.tolist())]
    M, _ = exact_maps(
        *(x.double() for x in args[1:]),
        lower_bound=BOUND,
        cu_seqlens_N1=torch.tensor(ends, device=device),
    )
    norms = torch.linalg.matrix_norm(M, ord=2)
    bounds = tiles.vector_CHX[..., DIM + 2 * BLOCKS.chunk].double().exp2()
    assert (norms <= bounds * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    "gate, precision, is_forgotten",
    [(FAST, IEEE, True), (MEDIUM, IEEE, True), (MEDIUM, WHOLE, False), (SLOW, IEEE, False)],
)
def test_maps_of_what_forgets_are_zero_and_those_of_what_does_not_are_whole(
    gate, precision, is_forgotten, device
):
    args = draw(device, gate)
    slab, tiles = prepared(args, 4, precision)
    pieces, count = slab.segments.maps, slab.segments.count
    M, S, kept = run_maps(args[2], tiles, slab, pieces, count, DIM, BLOCKS, precision)
    ends = torch.tensor([0, 64, 128], device=device)
    exact = [x[:128].double() for x in args[1:5]] + [x.double() for x in args[5:]]
    expected = exact_maps(*exact, lower_bound=BOUND, cu_seqlens_N1=ends)
    assert bool(M[:2].any()) is not is_forgotten
    assert (kept is None) is (precision is WHOLE)
    assert kept is None or bool(kept[:2].any()) is not is_forgotten
    assert torch.linalg.matrix_norm(M[:2] - expected[0]).max() < 1e-5
    assert relative_error(S[:2], expected[1]) < 1e-5


@pytest.mark.parametrize("gate", [FAST, SLOW])
@pytest.mark.parametrize("offsets", [(), (5, 70, 149)])
def test_segments_that_forget_give_the_states_of_the_recurrence(gate, offsets, device):
    args = draw(device, gate)
    state = Values(torch.float32, device, 1).full(1, HEADS, DIM, DIM)
    named = {
        "lower_bound": BOUND,
        "cu_seqlens_N1": torch.tensor([0, TOKENS], device=device),
        "output_final_state": True,
        "checkpoint_offsets": (offsets,),
    }

    def run(function, dtype, **options):
        checkpoints = torch.zeros(len(offsets), HEADS, DIM, DIM, dtype=dtype, device=device)
        results = function(
            *(x.to(dtype) for x in args),
            **named,
            initial_state_NHVK=state.to(dtype),
            checkpoints_EHVK=checkpoints,
            **options,
        )
        return [*results, *checkpoints]

    actual = run(kda_chunk, torch.float32, blocks=BLOCKS, segment_chunks=3)
    for a, b in zip(actual, run(recurrence, torch.float64), strict=True):
        assert relative_error(a, b) < 1e-5


def test_a_state_that_is_not_finite_is_not_forgotten(device):
    args = draw(device, FAST)
    state = torch.zeros(1, HEADS, DIM, DIM, device=device)
    state[0, 1, 3, 5] = float("nan")
    named = {"lower_bound": BOUND, "cu_seqlens_N1": torch.tensor([0, TOKENS], device=device)}
    named |= {"initial_state_NHVK": state, "output_final_state": True, "blocks": BLOCKS}
    cut, whole = (kda_chunk(*args, **named, segment_chunks=size) for size in (3, 0))
    for a, b in zip(cut, whole, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert whole[1][0, 1, 3].isnan().all() and whole[1].isnan().sum() == DIM
