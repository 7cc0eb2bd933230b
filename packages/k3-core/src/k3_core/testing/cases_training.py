"""Cases of newton_schulz and linear_cross_entropy (report 6)."""

from functools import partial

import torch

from k3_core.testing.cases import Case
from k3_core.testing.values import Call, Values


def _matrices(v: Values, shape: tuple[int, ...]) -> Call:
    return Call((v.act(*shape),))


def _loss(v: Values, tokens: int, reduction: str, num_ignored: int = 2, **named: float) -> Call:
    width, vocabulary = 24, 50
    labels = v.integers(vocabulary, tokens)
    labels[:num_ignored] = -100
    weights = v.act(tokens, width), v.act(vocabulary, width, scale=width**-0.5)
    return Call((*weights, labels), {"reduction": reduction, **named})


# Five quintic steps amplify the rounding of half precision beyond any useful tolerance.
FULL = (torch.float64, torch.float32)

CASES = [
    Case("newton_schulz", "wide", partial(_matrices, shape=(12, 30)), dtypes=FULL),
    Case("newton_schulz", "tall-stack", partial(_matrices, shape=(3, 20, 8)), dtypes=FULL),
    Case("linear_cross_entropy", "mean", partial(_loss, tokens=15, reduction="mean")),
    Case("linear_cross_entropy", "sum", partial(_loss, tokens=15, reduction="sum")),
    Case("linear_cross_entropy", "none", partial(_loss, tokens=15, reduction="none")),
    Case(
        "linear_cross_entropy",
        "z-loss",
        partial(_loss, tokens=15, reduction="none", z_loss=0.01),
    ),
    Case(
        "linear_cross_entropy",
        "all-ignored",
        partial(_loss, tokens=3, reduction="mean", num_ignored=3),
    ),
]
