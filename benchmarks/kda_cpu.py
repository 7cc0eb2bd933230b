"""KDA in chunk form against its token-by-token recurrence, on the CPU, in one run.

    python benchmarks/kda_cpu.py [--threads 2] [--repeats 7]

H = 4, float32, one sequence. The peer is `kda_chunk.reference`: out of place, one token at a time.
Times are medians in milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from k3_core.ops.kda_chunk import reference
from k3_kernels.kda_chunk import cpu

NUM_HEADS = 4
CASES = ((1024, 64), (1024, 128), (4096, 64), (4096, 128))


def make_inputs(num_tokens: int, head_dim: int) -> list[Tensor]:
    """q, k, v, gate, beta, A_log and dt_bias as a freshly initialised layer would see them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = (num_tokens, NUM_HEADS, head_dim)
    decay = (torch.zeros(NUM_HEADS), draw(NUM_HEADS, head_dim) - 4)
    return [draw(*heads), draw(*heads), draw(*heads), draw(*heads), draw(*heads[:2]), *decay]


def forward(op: Callable, inputs: list[Tensor]) -> Tensor:
    """One forward pass."""
    cu_seqlens = torch.tensor([0, len(inputs[0])])
    o_THV, _ = op(*inputs, lower_bound=-5.0, cu_seqlens_N1=cu_seqlens)
    return o_THV


def forward_backward(op: Callable, inputs: list[Tensor]) -> None:
    """One forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o_THV = forward(op, leaves)
    torch.autograd.grad(o_THV, leaves, o_THV.detach())


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    """Print one row a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, default=7, help="runs of the chunk form; 3 of the peer"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, H = {NUM_HEADS}, float32")
    print("| pass | T | D | recurrence ms | chunk ms | ratio |\n|---|---|---|---|---|---|")
    for name, run in (("forward", forward), ("forward+backward", forward_backward)):
        for num_tokens, head_dim in CASES:
            inputs = make_inputs(num_tokens, head_dim)
            slow = median_ms(partial(run, reference.kda_chunk, inputs), 3)
            fast = median_ms(partial(run, cpu.kda_chunk, inputs), args.repeats)
            row = f"{slow:.0f} | {fast:.1f} | {slow / fast:.1f}"
            print(f"| {name} | {num_tokens} | {head_dim} | {row} |", flush=True)


if __name__ == "__main__":
    main()
