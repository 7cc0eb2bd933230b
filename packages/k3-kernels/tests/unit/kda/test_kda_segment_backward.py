"""Gradients through kda_segment's maps against those of the recurrence (report 1.6, 1.7)."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk as recurrence
from k3_core.ops.kda_segment import apply_map, compose
from k3_core.ops.kda_segment.reference import kda_segment as reference
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_chunk.config import Blocks
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.kda_segment.op import kda_segment

NAMES = ("k", "v", "gate", "beta", "A_log", "dt_bias")
LENGTHS = (37, 0, 1, 26)
TOLERANCE = 1e-4


def draw(lengths, num_k, num_v, device, dtype=torch.float32, gate=-4.0, heads=2):
    """The six inputs, and gradients of M and of S."""
    v, total = Values(dtype, device, 0), sum(lengths)
    args = [v.act(total, heads, num_k), v.act(total, heads, num_v)]
    args += [v.act(total, heads, num_k) + gate, v.act(total, heads)]
    args += [v.full(heads, scale=0.3), v.full(heads, num_k, scale=0.5)]
    return args, [v.full(len(lengths), heads, n, num_k) for n in (num_k, num_v)]


def run(op, args, lengths, d_results, needs=NAMES, **options):
    """Maps and gradients; a result whose gradient is None is not used."""
    leaves = [x.detach().requires_grad_(name in needs) for name, x in zip(NAMES, args, strict=True)]
    offsets = torch.tensor([0, *lengths], device=args[0].device).cumsum(0)
    maps = op(*leaves, lower_bound=-5.0, cu_seqlens_N1=offsets, seqlens=lengths, **options)
    pairs = [(x, d) for x, d in zip(maps, d_results, strict=True) if d is not None]
    torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs])
    return maps, [x.grad for x in leaves]


def worst(args, d_results, lengths, **options):
    """Largest relative error of a map or a gradient."""
    maps, grads = run(kda_segment, args, lengths, d_results, **options)
    wide = [None if d is None else d.double() for d in d_results]
    exact_maps, exact = run(reference, [x.double() for x in args], lengths, wide)
    for x, grad in zip(args, grads, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape
    exact = [torch.zeros_like(x) if g is None else g for g, x in zip(exact, args, strict=True)]
    pairs = zip((*maps, *grads), (*exact_maps, *exact), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("gate", [-9.0, -4.0, 3.0])
@pytest.mark.parametrize("blocks", [None, Blocks(16, 16)])
@pytest.mark.parametrize("num_k, num_v", [(16, 16), (24, 40), (17, 1)])
def test_gradients(num_k, num_v, blocks, gate, device):
    inputs = draw(LENGTHS, num_k, num_v, device, gate=gate)
    assert worst(*inputs, LENGTHS, blocks=blocks) < TOLERANCE


@pytest.mark.parametrize("has_map, has_shift", [(True, False), (False, True)])
def test_gradient_of_one_result(has_map, has_shift, device):
    args, (d_map, d_shift) = draw(LENGTHS, 16, 16, device)
    d_results = [d_map if has_map else None, d_shift if has_shift else None]
    assert worst(args, d_results, LENGTHS) < TOLERANCE


def test_float16(device):
    inputs = draw((100, 29), 32, 32, device, torch.float16)
    assert worst(*inputs, (100, 29)) < 5e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_bfloat16(dim, device):
    inputs = draw((200, 1, 0, 70), dim, dim, device, torch.bfloat16, heads=4)
    assert worst(*inputs, (200, 1, 0, 70)) < 2e-2


def test_wider_heads_than_the_kernels_take(device):
    inputs = draw((5, 2), 192, 72, device, heads=1)
    assert worst(*inputs, (5, 2)) < TOLERANCE


def test_strided_inputs(device):
    args, d_results = draw((30, 15), 16, 24, device)
    for n in range(3):
        wide = torch.full((45, 2, 2 * args[n].shape[2]), torch.nan, device=device)
        wide[..., : args[n].shape[2]] = args[n]
        args[n] = wide[..., : args[n].shape[2]]
    args[3] = args[3].t().contiguous().t()
    d_results[0] = d_results[0].transpose(2, 3).contiguous().transpose(2, 3)
    assert worst(args, d_results, (30, 15)) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_need_of_a_single_input(name, device):
    args, d_results = draw((9,), 16, 16, device)
    _, everything = run(kda_segment, args, (9,), d_results)
    _, single = run(kda_segment, args, (9,), d_results, needs=(name,))
    for n, own in enumerate(NAMES):
        assert single[n] is None if own != name else torch.equal(single[n], everything[n])


@pytest.mark.parametrize("lengths, heads", [((), 2), ((0, 0), 2), ((3,), 0)])
def test_empty(lengths, heads, device):
    args, d_results = draw(lengths, 16, 16, device, heads=heads)
    _, grads = run(kda_segment, args, lengths, d_results)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in grads)


def test_poisoned_memory_and_determinism(device, monkeypatch):
    args, d_results = draw(LENGTHS, 24, 24, device)
    blocks = Blocks(16, 16)
    _, first = run(kda_segment, args, LENGTHS, d_results, blocks=blocks)
    made = torch.empty

    def poisoned(*size, **named):
        memory = made(*size, **named)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **_: poisoned(x.shape, dtype=x.dtype, device=x.device)
    )
    _, second = run(kda_segment, args, LENGTHS, d_results, blocks=blocks)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivatives_are_refused(device):
    args, _ = draw((5,), 16, 16, device)
    offsets = torch.tensor([0, 5], device=device)
    k = args[0].requires_grad_()
    maps = kda_segment(k, *args[1:], lower_bound=-5.0, cu_seqlens_N1=offsets)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(maps[0].sum(), k, create_graph=True)


def _in_parts(sizes, args, offsets):
    """o and the final state of one sequence whose parts know only each other's maps, as the ranks
    of a context-parallel group do."""
    named = {"lower_bound": -5.0, "output_final_state": True}
    cuts = [x.split(sizes) if n < 5 else [x] * len(sizes) for n, x in enumerate(args[:7])]
    parts = list(zip(*cuts, strict=True))
    outputs, so_far, state = [], None, args[7]
    for part, size in zip(parts, sizes, strict=True):
        cu = offsets[:1].repeat(2) + torch.tensor([0, size], device=offsets.device)
        start = state if so_far is None else apply_map(state, so_far)
        o, final = kda_chunk(*part, cu_seqlens_N1=cu, initial_state_NHVK=start, **named)
        outputs.append(o)
        own = kda_segment(*part[1:], lower_bound=-5.0, cu_seqlens_N1=cu)
        so_far = own if so_far is None else compose(so_far, own)
    return torch.cat(outputs), final


def test_parts_joined_by_their_maps_train_as_the_whole(device):
    args, _ = draw((90,), 16, 16, device)
    v = Values(torch.float32, device, 1)
    args = [v.act(90, 2, 16), *args, v.full(1, 2, 16, 16)]
    d_results = [v.act(90, 2, 16), v.full(1, 2, 16, 16)]
    offsets = torch.tensor([0, 90], device=device)
    own = [x.detach().requires_grad_() for x in args]
    found = torch.autograd.grad(_in_parts((40, 17, 33), own, offsets), own, d_results)
    exact = [x.detach().double().requires_grad_() for x in args]
    results = recurrence(
        *exact[:7],
        lower_bound=-5.0,
        cu_seqlens_N1=offsets,
        initial_state_NHVK=exact[7],
        output_final_state=True,
    )
    expected = torch.autograd.grad(results, exact, [d.double() for d in d_results])
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < TOLERANCE
