"""Schedules (report 5): warm-up, end points, floor, independence of the run's length."""

import itertools
import math

import pytest

from k3_core.plugins import resolve
from k3_train.config import load_train_config
from k3_train.loop.build import build_schedule
from k3_train.optim.constant import ConstantSchedule
from k3_train.optim.cosine import CosineSchedule
from k3_train.optim.wsd import WSDSchedule

SCHEDULES = {"cosine": CosineSchedule, "wsd": WSDSchedule, "constant": ConstantSchedule}


def make(schedule=CosineSchedule, total_steps=1000, warmup_ratio=0.01, min_lr_ratio=0.1):
    return schedule(
        total_steps=total_steps,
        warmup_ratio=warmup_ratio,
        min_lr_ratio=min_lr_ratio,
        decay_ratio=0.2,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_registry_builds_it_from_the_settings(name):
    settings = load_train_config(
        overrides=[f"schedule.name={name}", "schedule.total_steps=50", "schedule.decay_ratio=0.5"]
    )
    schedule = build_schedule(settings)
    assert type(schedule) is resolve("schedule", name).load() is SCHEDULES[name]
    assert (schedule.total_steps, schedule.warmup_steps) == (50, 1)
    assert (schedule.min_lr_ratio, schedule.decay_ratio) == (0.1, 0.5)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_warm_up_is_linear_over_one_percent(schedule):
    schedule = make(schedule)
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


def test_wsd_is_flat_then_a_line_to_the_floor():
    schedule = make(WSDSchedule)
    factors = [schedule.factor(step) for step in range(1200)]
    assert set(factors[10:800]) == {1.0}
    assert math.isclose(factors[899], 0.55)
    assert math.isclose(factors[999], 0.1)
    assert set(factors[999:]) == {factors[999]}
    steps = [before - after for before, after in itertools.pairwise(factors[799:1000])]
    assert all(math.isclose(step, 0.9 / 200) for step in steps)


def test_constant_never_falls():
    schedule = make(ConstantSchedule, min_lr_ratio=0.3)
    assert {schedule.factor(step) for step in range(10, 5000, 7)} == {1.0}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_tiny_horizons_are_finite(schedule, total_steps):
    schedule = make(schedule, total_steps)
    assert all(0 < schedule.factor(step) <= 1 for step in range(5))
