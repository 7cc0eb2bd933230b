"""Cases of benchmarks/kernels_ops.py: the ends of a training step."""

from functools import partial

import torch
from kernels_ops_cases import Case, randn
from torch import Tensor

from k3_core.ops.linear_cross_entropy.reference import linear_cross_entropy as loss_torch
from k3_core.ops.newton_schulz.reference import newton_schulz as newton_schulz_torch
from k3_core.testing import relative_error
from k3_kernels.linear_cross_entropy import op as loss_op
from k3_kernels.newton_schulz import op as newton_schulz_op


def loss_case(is_full: bool, device: str, dtype: torch.dtype, *, is_rounded: bool = False) -> Case:
    """The head and its loss, forward and backward; `is_rounded`: logits like inputs."""
    tokens, width, vocabulary = (8192, 2048, 163_840) if is_full else (21, 16, 50)
    hidden = randn(tokens, width, device=device, dtype=dtype, scale=2.0).requires_grad_()
    weight = randn(vocabulary, width, device=device, dtype=dtype, scale=width**-0.5)
    weight.requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    labels[::9] = -100
    op = partial(loss_op.linear_cross_entropy, logits_dtype=dtype if is_rounded else torch.float32)

    def gradients(function, *leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves, labels[: len(leaves[0])]), leaves)

    def error() -> float:
        few = [hidden[:64].detach(), weight.detach()]
        own = gradients(op, *(x.clone().requires_grad_() for x in few))
        exact = gradients(loss_torch, *(x.double().requires_grad_() for x in few))
        return max(relative_error(a, b) for a, b in zip(own, exact, strict=True))

    return Case(
        [partial(gradients, op, hidden, weight)],
        # Logits written, read, their gradients written and read twice, in the dtype of the inputs.
        5 * tokens * vocabulary * 2,
        error,
        6.0 * tokens * width * vocabulary,
        peer=partial(gradients, loss_torch, hidden, weight),
        peer_name="torch linear and cross_entropy",
    )


def newton_schulz_case(
    is_full: bool, device: str, dtype: torch.dtype, *, shape: tuple[int, int, int]
) -> Case:
    """5 steps on a stack; the floor counts products whose result is symmetric by half."""
    count, m, n = shape if is_full else (2, 8, 8 * shape[2] // shape[1])
    x = randn(count, m, n, device=device, dtype=dtype)
    is_gram = m < newton_schulz_op.SYMMETRIC_ROWS
    flop = 3 * m * m * n if is_gram else 5 * (3 * m * m * n + m**3)

    def error() -> float:
        return relative_error(
            newton_schulz_op.newton_schulz(x[:1]), newton_schulz_torch(x[:1].double())
        )

    return Case(
        [partial(newton_schulz_op.newton_schulz, x)],
        3.0 * x.nbytes,
        error,
        float(count * flop),
        peer=partial(newton_schulz_torch, x),
        peer_name="plain torch",
    )
