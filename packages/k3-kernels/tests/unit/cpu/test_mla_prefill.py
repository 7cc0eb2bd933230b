"""mla_prefill by torch's attention: widths of values, gradients, maxima."""

import pytest
import torch

from k3_core.ops.mla_prefill import reference
from k3_kernels.mla_prefill import cpu

QUERIES, KEYS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 5, 6, 9])


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("value_width", [4, 6, 9])
def test_values_of_any_width(value_width):
    """Narrow values are padded for torch's kernel; neither they nor wide ones may be cut."""
    widths = ((5, 6), (9, 6), (9, value_width))
    results = []
    for module in (cpu, reference):
        inputs = [rand(n, 2, w, seed=i).requires_grad_() for i, (n, w) in enumerate(widths)]
        out = module.mla_prefill(*inputs, scale=0.7, cu_seqlens_q=QUERIES, cu_seqlens_k=KEYS)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    torch.testing.assert_close(*results)


def test_more_queries_than_keys_are_refused():
    one, two = torch.tensor([0, 1]), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="at least as many keys"):
        cpu.mla_prefill(
            rand(2, 1, 4), rand(1, 1, 4), rand(1, 1, 4),
            scale=1.0, cu_seqlens_q=two, cu_seqlens_k=one,
        )  # fmt: skip
