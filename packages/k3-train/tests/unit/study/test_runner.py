"""A sitting keeps every finished run at once, skips those on file, and ends with its budget."""

import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from k3_train.study import runner as runner_module
from k3_train.study.declare import load_study
from k3_train.study.page import write_index, write_page
from k3_train.study.runner import Runner

STUDY = load_study("depth_mixing")
SECONDS = {"search": 0.0, "full": 0.0}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A maker of runners whose runs do nothing but say how long they took, and wait for `go`."""
    ran, seconds, go = [], dict(SECONDS), threading.Event()
    go.set()

    def fake(study, arm, scale, job, work):
        ran.append((job.arm, job.phase, job.rate))
        assert go.wait(timeout=60)
        return {
            "study": study, "scale": scale.name, **dataclasses.asdict(job), "status": "finished",
            "loss": 2.0 + job.seed, "seconds": seconds[job.phase], "device": "none",
        }  # fmt: skip

    monkeypatch.setattr(runner_module, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    monkeypatch.setattr(runner_module, "run_job", fake)
    monkeypatch.setattr(runner_module, "build_data", lambda folder, scale: None)

    def build(*names):
        arms = STUDY.chosen(names)
        return Runner(STUDY, "tiny", arms, out=tmp_path / "depth_mixing", work=tmp_path / "w")

    build.ran, build.seconds, build.go, build.out = ran, seconds, go, tmp_path / "depth_mixing"
    return build


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def sit(runner, budget=600.0, workers=1, say=lambda text: None):
    said = []

    def hear(text):
        said.append(text)
        say(text)

    return runner.run(deadline=time.monotonic() + budget, workers=workers, say=hear), said


def test_a_study_goes_on_over_sittings(make):
    outcome, said = sit(make("residual"), workers=2)
    assert (outcome.num_added, outcome.num_found, outcome.is_done) == (3, 0, True)
    assert len(said) == len(rows_of(make.out)) == 3
    outcome, _ = sit(make("residual", "block"))
    assert (outcome.num_added, outcome.num_found, outcome.is_done) == (3, 3, True)
    assert [run[0] for run in make.ran] == ["residual"] * 3 + ["block"] * 3
    assert sit(make())[0].is_done
    assert len({(row["arm"], row["phase"], row["rate"]) for row in rows_of(make.out)}) == 9


def test_no_run_begins_that_would_end_after_the_budget(make):
    make.seconds["search"] = 100.0
    outcome, _ = sit(make("residual"), budget=200.0)
    # A full run has three times the tokens of a short one.
    assert [run[1] for run in make.ran] == ["search", "search"]
    assert not outcome.is_done
    assert sit(make("residual"), budget=200.0)[0].num_added == 0
    assert sit(make("residual"), budget=600.0)[0].is_done


def test_what_runs_at_the_deadline_is_given_up_and_not_kept(make):
    make.go.clear()
    outcome, said = sit(make("residual"), budget=1.0, say=lambda text: make.go.set())
    assert (outcome.num_added, outcome.is_done) == (0, False)
    assert said == ["residual  search  seed 0  given up: the budget is spent"]
    assert not (make.out / "results.jsonl").exists()


def test_the_page_shows_bars_and_the_arms_that_were_not_run(make):
    sit(make("residual"))
    rows = rows_of(make.out)
    (full,) = [row for row in rows if row["phase"] == "full"]
    page = write_page(STUDY, make.out).read_text()
    assert "test of the machinery, no conclusion" in page
    assert page.count("<td>not run</td>") == 2
    assert '<tr class="absent"><td>block</td><td>not run</td>' in page
    assert f"<td>x{full['rate']:g}</td><td>2</td>" in page
    index = write_index(make.out.parent).read_text()
    assert "[Depth mixing](depth_mixing/index.html)" in index
    assert "| Load balancing |" in index


def test_means_of_seeds_have_their_standard_deviation(make):
    sit(make("residual"))
    rows = rows_of(make.out)
    scale = dataclasses.replace(STUDY.scale("cpu"))
    jobs = runner_module.Plan(STUDY.chosen(["residual"]), scale, [])
    arm = STUDY.chosen(["residual"])[0]
    found = []
    for job in jobs.search(arm):
        found.append({**rows[0], **dataclasses.asdict(job), "scale": "cpu", "loss": job.rate})
        jobs.add(found[-1])
    for job, loss in zip(jobs.full(arm), (2.0, 3.0), strict=True):
        found.append({**rows[0], **dataclasses.asdict(job), "scale": "cpu", "loss": loss})
    lines = "".join(json.dumps(row) + "\n" for row in found)
    (make.out / "results.jsonl").write_text(lines)
    page = write_page(STUDY, make.out).read_text()
    assert "<td>2 of 2</td><td>x0.5</td><td>2.5 ± 0.7071</td>" in page
    assert "mechanism check, no conclusion" in page
    assert "chosen x0.5, at the edge" in page
    assert "cpu: 1 of 3 arms" in write_index(make.out.parent).read_text()
