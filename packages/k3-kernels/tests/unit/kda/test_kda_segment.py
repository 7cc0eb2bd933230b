"""kda_segment's kernels against the recurrence, and the algebra of the maps (report 1.7)."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk as recurrence
from k3_core.ops.kda_segment import apply_map, compose
from k3_core.ops.kda_segment.reference import kda_segment as reference
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_chunk.config import Blocks
from k3_kernels.kda_segment.op import kda_segment


def draw(total, num_k, num_v, device, dtype=torch.float32):
    v = Values(dtype, device)
    args = [v.act(total, 2, num_k), v.act(total, 2, num_v)]
    args += [v.act(total, 2, num_k) - 4, v.act(total, 2)]
    return [*args, v.full(2, scale=0.3), v.full(2, num_k, scale=0.5)]


@pytest.mark.parametrize("blocks", [Blocks(32, 16), Blocks(16, 32)])
@pytest.mark.parametrize("num_k, num_v", [(16, 16), (16, 40), (24, 8)])
def test_maps_of_stretches(num_k, num_v, blocks, device):
    args = draw(91, num_k, num_v, device)
    offsets = torch.tensor([0, 70, 70, 71, 91], device=device)
    named = {"lower_bound": -5.0, "cu_seqlens_N1": offsets}
    maps = kda_segment(*args, **named, blocks=blocks)
    expected = reference(*(x.double() for x in args), **named)
    assert max(relative_error(a, b) for a, b in zip(maps, expected, strict=True)) < 1e-5
    assert torch.equal(maps[0][1], torch.eye(num_k, device=device).expand(2, -1, -1))
    assert not maps[1][1].any()


def test_composed_maps_move_a_state_as_the_recurrence_does(device):
    args = draw(80, 16, 16, device)
    offsets = torch.tensor([0, 33, 80], device=device)
    M, S = kda_segment(*args, lower_bound=-5.0, cu_seqlens_N1=offsets)
    start = torch.randn(1, 2, 16, 16, device=device)
    moved = apply_map(start, compose((M[:1], S[:1]), (M[1:], S[1:])))
    _, expected = recurrence(
        args[0].double(),
        *(x.double() for x in args),
        lower_bound=-5.0,
        cu_seqlens_N1=torch.tensor([0, 80], device=device),
        initial_state_NHVK=start.double(),
        output_final_state=True,
    )
    assert relative_error(moved, expected) < 1e-5


def test_float16(device):
    args = draw(70, 16, 16, device, torch.float16)
    named = {"lower_bound": -5.0, "cu_seqlens_N1": torch.tensor([0, 70], device=device)}
    maps = kda_segment(*args, **named, blocks=Blocks(32, 16))
    expected = reference(*(x.double() for x in args), **named)
    # The GPU cuts the operands of tf32 products off; the interpreter multiplies whole.
    limit = 5e-3 if maps[0].is_cuda else 2e-3
    assert max(relative_error(a, b) for a, b in zip(maps, expected, strict=True)) < limit


@pytest.mark.parametrize("needs", [False, True])
def test_unbounded_gates_are_refused(needs, device):
    args = draw(20, 16, 16, device)
    args[0].requires_grad_(needs)
    offsets = torch.tensor([0, 20], device=device)
    with pytest.raises(ValueError, match=r"kda_segment\.cpu"):
        kda_segment(*args, lower_bound=None, cu_seqlens_N1=offsets)
