"""What is left to run: searches first, then seed by seed; found rows are skipped."""

import dataclasses

import pytest

from k3_train.study.declare import Arm, load_study
from k3_train.study.plan import Plan

SCALE = dataclasses.replace(
    load_study("depth_mixing").scale("tiny"), seeds=2, rates=(0.5, 1.0, 2.0)
)
ARMS = [Arm("a"), Arm("b", rates=(3.0,))]


def row_of(job, loss):
    return {**dataclasses.asdict(job), "loss": loss}


def names(jobs):
    return [(job.arm, job.phase, job.rate, job.seed) for job in jobs]


def finish(plan, losses):
    """Run everything; the loss of a run depends on its rate."""
    order = []
    while job := plan.next([]):
        order.append(job)
        plan.add(row_of(job, losses(job)))
    return order


def test_arms_are_searched_and_then_run_seed_by_seed():
    order = finish(Plan(ARMS, SCALE, []), lambda job: abs(job.rate - 1.0))
    search = [("a", "search", rate, 0) for rate in (0.5, 1.0, 2.0)]
    full = [(arm, "full", rate, seed) for seed in (0, 1) for arm, rate in (("a", 1.0), ("b", 3.0))]
    assert names(order) == [*search, *full]


def test_an_arm_without_a_search_need_not_wait_and_running_ones_are_not_taken_twice():
    plan = Plan(ARMS, SCALE, [])
    taken = []
    while job := plan.next(taken):
        taken.append(job)
    assert names(taken)[3:] == [("b", "full", 3.0, 0), ("b", "full", 3.0, 1)]
    assert len(taken) == 5
    assert not plan.is_done()


def test_rows_on_file_are_skipped_unless_their_digest_is_another():
    first = Plan(ARMS, SCALE, [])
    order = finish(first, lambda job: job.rate)
    rows = [row_of(job, job.rate) for job in order]
    again = Plan(ARMS, SCALE, rows)
    assert again.is_done()
    assert again.next([]) is None
    stale = [row | {"digest": "other"} for row in rows]
    assert len(list(Plan(ARMS, SCALE, stale).runnable())) == 3 + 2


@pytest.mark.parametrize(
    ("losses", "rate"),
    [({0.5: 3, 1.0: 2, 2.0: 2.5}, 1.0), ({0.5: 3, 1.0: None, 2.0: None}, 0.5),
     ({0.5: None, 1.0: None, 2.0: None}, 0.5), ({0.5: 2, 1.0: 2, 2.0: 2}, 0.5)],
)  # fmt: skip
def test_the_rate_is_that_of_the_least_loss_and_stopped_runs_lose(losses, rate):
    plan = Plan(ARMS[:1], SCALE, [])
    finish(plan, lambda job: losses[job.rate] if job.phase == "search" else 1.0)
    assert plan.rate(ARMS[0]) == rate
    assert plan.is_done()
