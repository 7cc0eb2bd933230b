"""How a run of a study may end: a bad loss is a result, a signal is not."""

from types import SimpleNamespace

import pytest
import torch

from k3_core.errors import K3Error
from k3_train.loop.log import NonFiniteLossError
from k3_train.study import run as run_module
from k3_train.study.declare import load_study
from k3_train.study.run import run_job
from k3_train.study.settings import job_of, model_config

STUDY = load_study("depth_mixing")
SCALE = STUDY.scale("tiny")
ARM = STUDY.chosen(["block"])[0]
JOB = job_of(ARM, SCALE, "full", 1.0, 0)


def run_with(monkeypatch, tmp_path, train):
    stepper = SimpleNamespace(device=torch.device("cpu"))
    session = SimpleNamespace(
        train=train,
        model_config=model_config(ARM, SCALE),
        trainer=SimpleNamespace(stepper=stepper),
    )
    monkeypatch.setattr(run_module, "start", lambda config, folder, started: session)
    return run_job(STUDY.name, ARM, SCALE, JOB, tmp_path)


def test_a_run_that_stops_by_itself_is_a_row_with_its_reason(monkeypatch, tmp_path):
    def train(**length):
        raise NonFiniteLossError("loss or gradient norm is not finite at step 3")

    row = run_with(monkeypatch, tmp_path, train)
    assert (row["status"], row["arm"], row["digest"]) == ("stopped", "block", JOB.digest)
    assert "not finite at step 3" in row["reason"]
    assert "loss" not in row
    assert row["flops"] == 6 * row["active"] * JOB.tokens


def test_a_run_that_a_signal_ends_does_not_count(monkeypatch, tmp_path):
    with pytest.raises(K3Error, match="arm block was ended by SIGTERM"):
        run_with(monkeypatch, tmp_path, lambda **length: "SIGTERM")
