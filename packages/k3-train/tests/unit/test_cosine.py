"""The cosine schedule (report 5): warm-up, end points, floor, independence of the run's length."""

import math

import pytest

from k3_train.optim.cosine import CosineSchedule


def make(total_steps=1000, warmup_ratio=0.01, min_lr_ratio=0.1):
    return CosineSchedule(
        total_steps=total_steps, warmup_ratio=warmup_ratio, min_lr_ratio=min_lr_ratio
    )


def test_warm_up_is_linear_over_one_percent():
    schedule = make()
    assert [schedule.factor(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]


def test_half_way_is_the_middle_and_the_end_is_the_floor():
    schedule = make(total_steps=1010, warmup_ratio=10 / 1010)
    assert math.isclose(schedule.factor(9 + 500), 0.55)
    assert math.isclose(schedule.factor(1009), 0.1)


def test_it_never_rises_after_warm_up_and_stays_at_the_floor():
    factors = [make().factor(step) for step in range(9, 1200)]
    assert factors == sorted(factors, reverse=True)
    assert set(factors[-200:]) == {factors[-1]}
    assert math.isclose(factors[-1], 0.1)


@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_tiny_horizons_are_finite(total_steps):
    assert all(0 < make(total_steps).factor(step) <= 1 for step in range(5))
