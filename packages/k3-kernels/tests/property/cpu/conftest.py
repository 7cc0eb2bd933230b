"""Random packings of the KDA ops and the comparison of results and gradients."""

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def kda_inputs(
    lengths: tuple[int, ...],
    *,
    seed: int = 0,
    heads: int = 2,
    num_k: int = 8,
    num_v: int = 6,
    gate_scale: float = 3.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """q, k, v, gate, beta, A_log, dt_bias, initial state; drawn in float64, rounded once."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    tokens = sum(lengths)
    return (
        draw(tokens, heads, num_k),
        draw(tokens, heads, num_k),
        draw(tokens, heads, num_v),
        draw(tokens, heads, num_k, scale=gate_scale),
        draw(tokens, heads, scale=2.0),
        draw(heads, scale=0.3),
        draw(heads, num_k),
        draw(len(lengths), heads, num_v, num_k),
    )


def run_chunk(
    op: Callable,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    lower_bound: float | None = -5.0,
    has_gradients: bool = True,
) -> list[Tensor]:
    """o, final state, then the gradients of all inputs for a fixed random projection."""
    leaves = [x.detach().clone().requires_grad_(has_gradients) for x in inputs]
    results = op(
        *leaves[:7],
        lower_bound=lower_bound,
        cu_seqlens_N1=offsets(lengths),
        initial_state_NHVK=leaves[7],
        output_final_state=True,
    )
    found = [x.detach() for x in results]
    if not has_gradients:
        return found
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    total = sum((x * w.to(x.dtype)).sum() for x, w in zip(results, weights, strict=True))
    return [*found, *torch.autograd.grad(total, leaves, materialize_grads=True)]


NAMES = ("o", "final", "q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial")


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Largest difference relative to the largest value, or to 1 where that is smaller."""
    assert len(actual) == len(expected)
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        assert a.shape == b.shape
        if a.numel():
            error = (a.double() - b.double()).abs().max() / max(1.0, b.abs().max().item())
            assert error <= tolerance, f"{name}: error {error:.2e}, allowed {tolerance:.0e}"


@pytest.fixture(scope="session")
def kda() -> SimpleNamespace:
    """The helpers above, for tests that cannot import a sibling."""
    return SimpleNamespace(
        offsets=offsets, inputs=kda_inputs, run_chunk=run_chunk, assert_close=assert_close
    )
