"""Intervals against their definitions and against repeated draws."""

import math
import random

import pytest

from k3_train.evaluate.intervals import Z, ratio, wilson


@pytest.mark.parametrize("right, count", [(0, 5), (5, 5), (3, 7), (50, 200)])
def test_wilson_bounds_are_where_the_share_is_z_deviations_away(right, count):
    share = right / count
    for bound in wilson(right, count):
        assert 0 <= bound <= 1
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / count))
    with pytest.raises(ValueError, match="8 right of 7"):
        wilson(8, 7)


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says():
    rng = random.Random(0)
    held = 0
    for _ in range(400):
        sizes = [rng.randint(10, 200) for _ in range(50)]
        tops = [size * rng.gauss(2.0, 0.5) for size in sizes]
        value, low, high = ratio(tops, sizes)
        assert value == pytest.approx(sum(tops) / sum(sizes))
        held += low <= 2.0 <= high
    assert 0.9 <= held / 400 <= 0.99
    assert ratio([3.0], [2.0]) == (1.5, None, None)
