"""kda_segment on the chunk form against the recurrence, gradients included (report 1.7)."""

import torch

from k3_core.ops.kda_segment import reference
from k3_core.testing.values import Values
from k3_kernels.kda_segment import cpu

LENGTHS, H, K, V = (5, 0, 37), 2, 6, 4


def inputs():
    v = Values(torch.float64, "cpu")
    tokens = sum(LENGTHS)
    args = [v.act(tokens, H, K), v.act(tokens, H, V), v.act(tokens, H, K), v.act(tokens, H)]
    return [*args, v.full(H, scale=0.3), v.full(H, K)]


def test_maps_and_gradients_of_every_input():
    args = [x.requires_grad_() for x in inputs()]
    cu = torch.tensor((0, *LENGTHS)).cumsum(0)
    weights = [torch.randn(3, H, n, K, dtype=torch.float64) for n in (K, V)]

    def run(segment):
        results = segment(*args, lower_bound=-5.0, cu_seqlens_N1=cu)
        total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        return [*results, *torch.autograd.grad(total, args)]

    found = run(cpu.kda_segment)
    torch.testing.assert_close(found, run(reference.kda_segment), rtol=0, atol=1e-10)
    assert all(bool(x.any()) for x in found)


def test_gradients_of_both_parts_of_a_map():
    lengths = (3, 0, 34)
    args = [x[:37, ..., :3] if x.dim() == 3 else x for x in inputs()]
    args[3], args[5] = args[3][:37], args[5][:, :3]
    cu = torch.tensor((0, *lengths)).cumsum(0)

    def segment(*args):
        return cpu.kda_segment(*args, lower_bound=-5.0, cu_seqlens_N1=cu, seqlens=lengths)

    leaves = [x.detach().clone().requires_grad_() for x in args]
    assert torch.autograd.gradcheck(segment, leaves, fast_mode=True)
