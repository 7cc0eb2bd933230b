"""The scaling law: it finds a planted law, and says when the runs are too few or too close."""

import random

import pytest

from k3_core.errors import K3Error
from k3_train.study.scaling import describe_law, fit, support


def planted(decades, noise, sizes=8, repeats=2):
    rng = random.Random(3)
    flops = [1e12 * 10 ** (decades * i / (sizes - 1)) for i in range(sizes) for _ in range(repeats)]
    return flops, [1.7 + 2.0 * (c / 1e12) ** -0.3 + rng.gauss(0, noise) for c in flops]


def test_a_planted_law_is_found():
    law = fit(*planted(4, 0.0))
    assert (law.floor, law.scale, law.exponent) == pytest.approx((1.7, 2.0, 0.3), abs=0.02)
    assert law.at(1e12) == pytest.approx(3.7, abs=0.01)


def test_a_wide_range_supports_an_exponent_and_a_narrow_one_says_that_it_does_not():
    wide, narrow = support(*planted(4, 0.005)), support(*planted(0.5, 0.02))
    assert wide.exponents[0] <= 0.31
    assert wide.exponents[1] >= 0.29
    assert wide.exponents[1] - wide.exponents[0] < 0.1
    assert narrow.exponents[1] - narrow.exponents[0] > 0.15
    assert "the exponent is not supported" in narrow.describe()
    assert "not supported" not in wide.describe()
    assert "over 0.50 decades" in narrow.describe()
    assert narrow.predictions[1] - narrow.predictions[0] > 4 * 0.02


def test_falling_or_flat_losses_get_a_floor_that_is_not_negative():
    law = fit([1, 10, 100, 1000], [4.0, 2.0, 1.0, 0.5])
    assert law.floor == 0
    assert fit([1, 2, 4, 8], [2.0, 2.0, 2.0, 2.0]).at(100) == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(
    ("flops", "losses", "match"),
    [([1, 1, 2, 3], [1, 1, 1, 1], "3 different FLOPs"), ([1, 2], [1], "2 FLOPs for 1 losses"),
     ([1, 2, 3, 0], [1, 1, 1, 1], "above zero"), ([], [], "above zero")],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused(flops, losses, match):
    with pytest.raises(K3Error, match=match):
        fit(flops, losses)


def test_only_finished_full_runs_count():
    flops, losses = planted(4, 0.0)
    rows = [
        {"phase": "full", "status": "finished", "flops": c, "loss": loss}
        for c, loss in zip(flops, losses, strict=True)
    ]
    noise = [rows[0] | {"phase": "search", "loss": 99.0}, rows[1] | {"status": "stopped"}]
    assert describe_law([*rows, *noise]) == describe_law(rows)
