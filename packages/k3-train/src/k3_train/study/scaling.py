"""A scaling law through a few runs, and how little they support it.

loss = floor + scale * (flops / least flops) ** -exponent, by least squares. For a given exponent
the other two follow linearly, so the exponent is searched on a grid. What the fit is worth is told
by fits to the runs drawn again with replacement (bootstrap), and by the range of the FLOPs.
N runs, X exponents.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error

EXPONENTS = np.linspace(0.01, 1.0, 100)
MIN_SIZES = 4
"""Different FLOPs that three unknowns and one residual need."""
DECADES = 2.0
"""Range of FLOPs below which an exponent is not to be believed (our own rule of thumb)."""
REPEATS = 400
AHEAD = 10.0
"""How many times the largest FLOPs the prediction is made for, to show how far it scatters."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScalingLaw:
    """A fit: loss = floor + scale * (flops / unit) ** -exponent."""

    floor: float
    scale: float
    exponent: float
    unit: float
    error: float

    def at(self, flops: float) -> float:
        """The loss that the fit expects."""
        return float(self.floor + self.scale * (flops / self.unit) ** -self.exponent)


@dataclass(frozen=True)
class Support:
    """What a fit rests on: intervals hold 90% of the fits to runs drawn again."""

    law: ScalingLaw
    num_runs: int
    num_sizes: int
    decades: float
    exponents: tuple[float, float]
    floors: tuple[float, float]
    largest: float
    predictions: tuple[float, float]

    def describe(self) -> str:
        """The fit and its limits in words."""
        law, (low, high) = self.law, self.exponents
        lines = [
            f"loss = {law.floor:.3f} + {law.scale:.3f} (FLOPs / {law.unit:.3g})^-{law.exponent:.2f}"
            f", residual {law.error:.4f} nats",
            f"from {self.num_runs} runs of {self.num_sizes} sizes over {self.decades:.2f} decades "
            "of FLOPs",
            f"90% of fits to runs drawn again: exponent {low:.2f} to {high:.2f}, floor "
            f"{self.floors[0]:.2f} to {self.floors[1]:.2f}",
            f"loss at {AHEAD:g} times the largest FLOPs: {self.predictions[0]:.3f} to "
            f"{self.predictions[1]:.3f}",
        ]
        if self.decades < DECADES:
            lines.append(
                f"the range is below {DECADES:g} decades: the exponent is not supported, and "
                "nothing outside the range is"
            )
        elif high > 2 * low:
            lines.append("the exponent is known to less than a factor of two: do not extrapolate")
        return "\n".join(lines)


def fit(flops: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The law of least squared error with a floor and a scale that are not negative.

    K3Error with fewer than four different FLOPs, or with values that are not above zero.
    """
    if len(flops) != len(losses):
        raise K3Error(f"{len(flops)} FLOPs for {len(losses)} losses: give one loss each")
    if min((*flops, *losses), default=0) <= 0:
        raise K3Error("FLOPs and losses have to be above zero; leave out runs that stopped")
    sizes = len(set(flops))
    if sizes < MIN_SIZES:
        raise K3Error(
            f"the runs have {sizes} different FLOPs; a law with three unknowns needs {MIN_SIZES}"
        )
    return _fit(np.array(flops, float), np.array(losses, float))


def support(flops: Sequence[float], losses: Sequence[float], *, seed: int = 0) -> Support:
    """The fit of `fit` and how far fits to the runs drawn again scatter."""
    law = fit(flops, losses)
    x, y, rng = np.array(flops, float), np.array(losses, float), random.Random(seed)
    laws: list[ScalingLaw] = []
    while len(laws) < REPEATS:
        drawn = [rng.randrange(len(x)) for _ in x]
        if len({flops[i] for i in drawn}) >= 3:
            laws.append(_fit(x[drawn], y[drawn], law.unit))
    largest = AHEAD * max(flops)
    return Support(
        law=law,
        num_runs=len(x),
        num_sizes=len(set(flops)),
        decades=float(np.log10(x.max() / x.min())),
        exponents=_interval([one.exponent for one in laws]),
        floors=_interval([one.floor for one in laws]),
        largest=largest,
        predictions=_interval([one.at(largest) for one in laws]),
    )


def describe_law(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fit through the finished full runs among rows of results, in words; K3Error as `fit`."""
    kept = [row for row in rows if row["phase"] == "full" and row["status"] == "finished"]
    return support([row["flops"] for row in kept], [row["loss"] for row in kept]).describe()


def _fit(x: Floats, y: Floats, unit: float | None = None) -> ScalingLaw:
    """For all exponents X at once: with a floor, and without one where it would be negative."""
    unit = float(x.min()) if unit is None else unit
    power_XN = (x / unit) ** -EXPONENTS[:, None]
    mean_X1 = power_XN.mean(1, keepdims=True)
    centred_XN = power_XN - mean_X1
    slope_X = centred_XN @ y / (centred_XN**2).sum(1)
    floor_X = y.mean() - slope_X * mean_X1[:, 0]
    is_floored_X = (floor_X >= 0) & (slope_X >= 0)
    floor_X = np.where(is_floored_X, floor_X, 0.0)
    scale_X = np.where(is_floored_X, slope_X, power_XN @ y / (power_XN**2).sum(1))
    residual_XN = floor_X[:, None] + scale_X[:, None] * power_XN - y
    error_X = np.sqrt((residual_XN**2).mean(1))
    best = int(error_X.argmin())
    chosen = floor_X[best], scale_X[best], EXPONENTS[best], unit, error_X[best]
    return ScalingLaw(*map(float, chosen))


def _interval(values: Sequence[float]) -> tuple[float, float]:
    twentieths = statistics.quantiles(values, n=20)
    return twentieths[0], twentieths[-1]
