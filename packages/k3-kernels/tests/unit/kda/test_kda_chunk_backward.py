"""Gradients of kda_chunk's kernels against those of the float64 recurrence (report 1.3)."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3_core.ops.kda_chunk.reference import kda_chunk as reference
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_chunk.backward_plan import choose_saves, make_backward_plan
from k3_kernels.kda_chunk.config import BF16, Blocks, Precision
from k3_kernels.kda_chunk.forward import Saves
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.kda_chunk.workspace import chunk_bytes

ONE = Blocks(16, 16)
HALF = Precision(torch.float16, torch.float16, torch.float16, "tf32", "tf32x3", -20.0)
"""Operands of 16 bits that the interpreter knows, for gates whose decays they hold."""
TOLERANCE = 1e-4
NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state")


def draw(lengths, heads, num_k, num_v, device, dtype=torch.float32, gate=(1.0, 0.0), key_heads=0):
    """The seven inputs and a state, and gradients of o and of the final state."""
    v, total = Values(dtype, device, 0), sum(lengths)
    args = [v.act(total, key_heads or heads, num_k) for _ in range(2)]
    args.append(v.act(total, heads, num_v))
    args.append(v.act(total, heads, num_k, scale=gate[0]) + gate[1])
    args.append(v.act(total, heads))
    args += [v.full(heads, scale=0.3), v.full(heads, num_k, scale=0.5)]
    args.append(v.full(len(lengths), heads, num_v, num_k))
    return args, [v.act(total, heads, num_v), v.full(len(lengths), heads, num_v, num_k, scale=0.3)]


def run(op, args, lengths, d_results, needs=NAMES, lower_bound=-5.0, **options):
    """Results and gradients; one of None has no gradient. Options go to the op."""
    leaves = [x.detach().requires_grad_(name in needs) for name, x in zip(NAMES, args, strict=True)]
    offsets = torch.tensor([0, *lengths], device=args[0].device).cumsum(0)
    named = {"lower_bound": lower_bound, "cu_seqlens_N1": offsets, "output_final_state": True}
    results = op(*leaves[:7], **named, initial_state_NHVK=leaves[7], **options)
    pairs = [(y, d) for y, d in zip(results, d_results, strict=True) if d is not None]
    torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])
    return results, [x.grad for x in leaves]


def filled(grads, args):
    """Gradients with zeros for what a result does not depend on."""
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, args, strict=True)]


def errors(args, d_results, lengths, lower_bound=-5.0, **options):
    """Relative errors of the gradients, by name."""
    bound = {"lower_bound": lower_bound}
    results, grads = run(kda_chunk, args, lengths, d_results, **bound, **options)
    wide = [None if d is None else d.double() for d in d_results]
    expected, exact = run(reference, [x.double() for x in args], lengths, wide, **bound)
    exact = filled(exact, args)
    for x, grad in zip(args, grads, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape
    assert relative_error(results[0], expected[0]) < 5e-3
    return {n: relative_error(a, b) for n, a, b in zip(NAMES, grads, exact, strict=True)}


def worst(inputs, lengths, **options):
    """The largest error; a fifth of that of A_log, whose terms of both signs cancel to 4% of their
    norm where gates forget all."""
    found = errors(*inputs, lengths, **options)
    return max(found[name] / (5 if name == "A_log" else 1) for name in NAMES)


@pytest.mark.parametrize("lengths", [(1,), (32,), (5, 1, 0, 67), (0, 0, 40, 0)])
def test_lengths(lengths, device):
    assert worst(draw(lengths, 2, 16, 16, device), lengths) < TOLERANCE


@pytest.mark.parametrize("num_k, num_v", [(24, 40), (17, 1), (64, 64), (72, 16)])
def test_head_dimensions(num_k, num_v, device):
    assert worst(draw((70,), 1, num_k, num_v, device), (70,)) < TOLERANCE


@pytest.mark.parametrize("gate", [(1.0, -9.0), (1.0, -4.0), (0.0, -60.0), (1.0, 3.0)])
@pytest.mark.parametrize("blocks", [None, ONE])
def test_gates(gate, blocks, device):
    assert worst(draw((130,), 1, 32, 16, device, gate=gate), (130,), blocks=blocks) < TOLERANCE


@pytest.mark.parametrize("slabs, stretch, num_slabs", [(1, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_slabs_and_stretches(slabs, stretch, num_slabs, device):
    lengths = (50, 0, 17, 35)
    options = {"backward_slabs": slabs, "stretch": stretch, "num_slabs": num_slabs}
    options["saves"] = Saves.NOTHING
    inputs = draw(lengths, 1, 16, 16, device, gate=(1.0, -4.0))
    assert worst(inputs, lengths, **options, blocks=ONE, segment_chunks=2) < TOLERANCE


@pytest.mark.parametrize("gate", [(1.0, -6.0), (1.0, 3.0)])
@pytest.mark.parametrize("slabs, size, saves", [(1, 1, 0), (1, 2, 2), (2, 2, 0), (2, 2, 1)])
def test_segments_of_the_reverse_scan(slabs, size, saves, gate, device):
    lengths = (50, 0, 17, 83)
    options = {"backward_slabs": slabs, "reverse_chunks": size, "saves": Saves(saves)}
    inputs = draw(lengths, 2, 16, 24, device, gate=gate)
    assert worst(inputs, lengths, **options, blocks=ONE, num_slabs=slabs) < TOLERANCE


def test_segments_of_the_reverse_scan_are_taken_last_first():
    plan = make_backward_plan((100, 0, 40), 16, 8, 3, 1, torch.device("cpu"))
    (slab,) = plan.slabs
    assert plan.has_maps and slab.segments.parts.tolist() == [[0, 0], [3, 2], [4, 0]]
    runs = sorted(slab.segments.runs.table.tolist(), key=lambda row: row[4])
    assert [row[2:] for row in runs] == [[6, 1, 0, -1], [3, 3, 1, -1], [0, 3, 2, 0], [7, 3, 3, 2]]
    assert sorted(row[4] for row in slab.segments.maps.table.tolist()) == [0, 1]


def test_whole_sequences_start_from_their_own_gradient():
    plan = make_backward_plan((100, 0, 40), 16, 8, 0, 2, torch.device("cpu"))
    rows = [slab.segments.runs.table.tolist() for slab in plan.slabs]
    assert not plan.has_maps
    assert [[row[2:] for row in slab] for slab in rows] == [
        [[0, 5, 0, 0]],
        [[2, 3, 2, 2], [0, 2, 0, 0]],
    ]


@pytest.mark.parametrize("saves", Saves)
def test_what_is_saved_may_be_moved_or_made_again(saves, device):
    lengths = (20, 0, 9)
    args, d_results = draw(lengths, 1, 16, 16, device)
    options = {"saves": saves, "blocks": ONE, "stretch": 1}
    _, expected = run(kda_chunk, args, lengths, d_results, **options)
    moved = []

    def pack(x):
        moved.append(x.detach().clone(memory_format=torch.contiguous_format))
        return moved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, grads = run(kda_chunk, args, lengths, d_results, **options)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    # Eight inputs and o; states at stretches, or tiles, or these with the states of chunks.
    assert len(moved) == 9 + {Saves.NOTHING: 1, Saves.TILES: 3, Saves.TILES_AND_STATES: 4}[saves]

    def again(*args, **named):
        return checkpoint(kda_chunk, *args, use_reentrant=False, **named)

    _, grads = run(again, args, lengths, d_results, **options)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("saves", Saves)
@pytest.mark.parametrize("num_slabs, slabs", [(1, 2), (3, 1)])
def test_what_is_saved_changes_nothing(saves, num_slabs, slabs, device):
    lengths = (50, 0, 17, 1)
    args, d_results = draw(lengths, 2, 16, 24, device)
    options = {"blocks": ONE, "num_slabs": num_slabs, "backward_slabs": slabs, "stretch": 1}
    results = [run(kda_chunk, args, lengths, d_results, saves=s, **options) for s in (saves, None)]
    for a, b in zip(*(x + tuple(y) for x, y in results), strict=True):
        assert relative_error(a, b) < 1e-6


def test_saved_memory_stays_below_inputs_and_gradients():
    sizes = chunk_bytes((1, 128, 128), Blocks(32, 64), BF16)
    assert choose_saves(sizes, 256 * 96, 64 * 96) == Saves.TILES
    assert choose_saves(sizes, 2048 * 24, 256 * 24) == Saves.TILES_AND_STATES
    assert choose_saves(sizes, 64 * 96, 64 * 96) == Saves.TILES_AND_STATES
    assert choose_saves(sizes, 2048 * 96, 64 * 96) == Saves.NOTHING


def test_saved_states_are_the_starts_of_stretches():
    plan = make_backward_plan((100, 0, 40), 16, 2, 0, 2, torch.device("cpu"))
    assert plan.offsets == ((32, 64, 80), (), (32,)) and plan.num_chunks == 10
    starts = [sorted(s.stretches.table[:, 4].tolist()) for s in plan.slabs]
    assert starts == [[-2, -1, 0], [-4, -3, 2]]


def test_value_heads_share_key_heads(device):
    inputs = draw((40, 9), 4, 16, 16, device, key_heads=2)
    assert worst(inputs, (40, 9)) < TOLERANCE


@pytest.mark.parametrize("gate", [(1.0, 0.0), (1.0, -6.5)])
def test_float16(gate, device):
    inputs = draw((100, 29), 2, 32, 32, device, torch.float16, gate)
    assert worst(inputs, (100, 29)) < 5e-3


def test_rounding_of_a_pair_cancels_before_both(device):
    inputs = draw((130,), 2, 32, 32, device, torch.float16)
    options = {"lower_bound": -1.0, "precision": HALF, "blocks": Blocks(16, 32)}
    found = errors(*inputs, (130,), **options)
    assert max(found["A_log"], found["dt_bias"]) < 6e-4
    assert max(found.values()) < 1e-3


@pytest.mark.parametrize("logits", [(-25.0,), (-25.0, -60.0, 0.0), (-60.0, 4.0)])
def test_small_betas(logits, device):
    args, d_results = draw((70,), 2, 16, 16, device, gate=(1.0, -4.0))
    args[4] = torch.tensor(logits, device=device).repeat(140)[:140].view(70, 2).contiguous()
    args[7].mul_(0.1)
    assert worst((args, d_results), (70,)) < TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("gate", [(1.0, 0.0), (1.0, -6.5)])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_bfloat16(gate, dim, device):
    lengths = (200, 1, 0, 70)
    found = errors(*draw(lengths, 4, dim, dim, device, torch.bfloat16, gate), lengths)
    assert max(found[name] for name in ("q", "k", "v", "state", "dt_bias")) < 8e-3
    assert max(found["gate"], found["beta"]) < 2e-2 and found["A_log"] < 5e-2


def test_repeated_keys(device):
    args, d_results = draw((130,), 1, 32, 32, device)
    args[1] = (args[1][:1] + 0.4 * args[1]).contiguous()
    args[3].fill_(-6.0), args[4].fill_(3.0)
    assert worst((args, d_results), (130,)) < TOLERANCE


def test_strided_inputs(device):
    lengths = (30, 15)
    args, d_results = draw(lengths, 3, 16, 24, device)
    for n in range(4):
        wide = torch.full((45, 3, 2 * args[n].shape[2]), torch.nan, device=device)
        wide[..., : args[n].shape[2]] = args[n]
        args[n] = wide[..., : args[n].shape[2]]
    args[1] = args[1].transpose(1, 2).contiguous().transpose(1, 2)
    args[4] = args[4].t().contiguous().t()
    d_results[0] = d_results[0].transpose(0, 1).contiguous().transpose(0, 1)
    d_results[1] = d_results[1].transpose(2, 3).contiguous().transpose(2, 3)
    assert worst((args, d_results), lengths) < TOLERANCE


@pytest.mark.parametrize("has_o, has_final", [(True, False), (False, True)])
def test_gradient_of_one_result(has_o, has_final, device):
    args, (d_o, d_final) = draw((40, 3), 2, 16, 16, device)
    d_results = [d_o if has_o else None, d_final if has_final else None]
    assert worst((args, d_results), (40, 3)) < TOLERANCE


def test_without_states(device):
    args, (d_o, _) = draw((40, 3), 2, 16, 16, device)
    leaves = [x.requires_grad_() for x in args[:7]]
    offsets = torch.tensor([0, 40, 43], device=device)
    o, final = kda_chunk(*leaves, lower_bound=-5.0, cu_seqlens_N1=offsets)
    assert final is None
    o.backward(d_o)
    zero = torch.zeros_like(args[7])
    _, expected = run(reference, [*args[:7], zero], (40, 3), [d_o, None])
    for x, grad in zip(leaves, expected, strict=False):
        assert relative_error(x.grad, grad) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_need_of_a_single_input(name, device):
    inputs = draw((9,), 1, 16, 16, device)
    _, everything = run(kda_chunk, inputs[0], (9,), inputs[1])
    _, single = run(kda_chunk, inputs[0], (9,), inputs[1], needs=(name,))
    for n, own in enumerate(NAMES):
        assert single[n] is None if own != name else torch.equal(single[n], everything[n])


@pytest.mark.parametrize("lengths, heads", [((), 2), ((0, 0), 2), ((3,), 0)])
def test_empty(lengths, heads, device):
    args, d_results = draw(lengths, heads, 16, 16, device)
    _, grads = run(kda_chunk, args, lengths, d_results)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in grads[:7])
    if sum(lengths) == 0:
        assert torch.equal(grads[7], d_results[1])


@pytest.mark.parametrize("saves", [Saves.NOTHING, Saves.TILES_AND_STATES])
def test_poisoned_memory_and_determinism(saves, device, monkeypatch):
    lengths = (37, 0, 26)
    inputs = draw(lengths, 1, 24, 24, device)
    options = {"backward_slabs": 2, "stretch": 1, "saves": saves}
    _, first = run(kda_chunk, inputs[0], lengths, inputs[1], **options)
    made = torch.empty

    def poisoned(*size, **named):
        memory = made(*size, **named)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **_: poisoned(x.shape, dtype=x.dtype, device=x.device)
    )
    _, second = run(kda_chunk, inputs[0], lengths, inputs[1], **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_checkpoints_beside_gradients(device):
    lengths, offsets = (70, 20), ((16, 33, 70), (5,))
    args, d_results = draw(lengths, 2, 16, 16, device)
    found, expected = (torch.zeros(4, 2, 16, 16, device=device) for _ in range(2))
    options = {"checkpoint_offsets": offsets, "checkpoints_EHVK": found, "stretch": 1}
    _, grads = run(kda_chunk, args, lengths, d_results, **options)
    options = {"checkpoint_offsets": offsets, "checkpoints_EHVK": expected}
    _, exact = run(reference, args, lengths, d_results, **options)
    assert relative_error(found, expected) < 1e-5
    assert all(relative_error(a, b) < TOLERANCE for a, b in zip(grads, exact, strict=True))


def test_second_derivatives_are_refused(device):
    args, _ = draw((5,), 1, 16, 16, device)
    q = args[0].requires_grad_()
    offsets = torch.tensor([0, 5], device=device)
    o, _ = kda_chunk(q, *args[1:7], lower_bound=-5.0, cu_seqlens_N1=offsets)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
