"""`k3 train study` for real: two arms of the smallest scale, by processes, and its page."""

import json
import re

import pytest
import torch

from k3_core.cli.app import run
from k3_train.study.clamped_glu import clamped_glu


def test_two_arms_run_once_and_are_found_again(tmp_path, capfd):
    options = [f"--out={tmp_path / 'studies'}", f"--work={tmp_path / 'work'}", "--scale=tiny"]
    command = ["train", "study", "kda_ratio", "--arms=0-1,1-1", "--budget-minutes=10", *options]
    assert run(command) == 0
    folder = tmp_path / "studies/kda_ratio"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    full = {row["arm"]: row for row in rows if row["phase"] == "full"}
    assert (len(rows), set(full)) == (6, {"0-1", "1-1"})
    for row in rows:
        assert row["status"] == "finished"
        assert 0 < row["loss"] < 7
        assert len(row["curves"]["loss"]) == len(row["curves"]["tokens"]) > 1
        assert {"recall_accuracy", "prefill_ms", "head_spread", "activation_max"} < row.keys()
    assert full["1-1"]["state_bytes"] != full["0-1"]["state_bytes"]
    assert not list((tmp_path / "work/kda_ratio-tiny/runs").iterdir())
    page = (folder / "index.html").read_text()
    assert page.count("<td>not run</td>") == 3
    assert not re.search(r"<script|https?://|src=", page)
    assert run(command) == 0
    assert "0 runs added, 6 were there; all runs are done" in capfd.readouterr().out
    assert run(["train", "scaling", str(folder / "results.jsonl"), "--scale=tiny"]) != 0
    assert "2 different FLOPs" in capfd.readouterr().err


def test_studies_are_listed_and_a_wrong_budget_is_refused(capsys):
    assert run(["train", "study"]) == 0
    assert "depth_mixing: Depth mixing; arms residual, block, full" in capsys.readouterr().out
    assert run(["train", "study", "balance", "--budget-minutes=0"]) != 0
    assert "--budget-minutes 0" in capsys.readouterr().err


def test_clamped_glu_is_swiglu_inside_its_limits_and_flat_outside():
    values = torch.tensor([-20.0, -3.0, 0.5, 6.0, 20.0])
    got = clamped_glu(values, torch.full((5,), 2.0), beta=4.0, linear_beta=25.0)
    inside = torch.nn.functional.silu(values) * 2
    torch.testing.assert_close(got[:4], inside[:4])
    assert float(got[4]) == pytest.approx(2 * 7 / (1 + 2.718281828**-7), rel=1e-5)
    assert clamped_glu(values[:1] + 21, values[4:], beta=4.0, linear_beta=None) == pytest.approx(
        float(torch.nn.functional.silu(torch.tensor(1.0)) * 7)
    )


def test_the_event_puts_the_clamped_activation_into_every_feed_forward(tmp_path, make_trainer):
    from k3_train.loop.progress import make_reporter
    from k3_train.optim.cosine import CosineSchedule

    trainer = make_trainer(tmp_path, "run.events=['clamped_glu']")
    schedule = CosineSchedule(total_steps=2, warmup_ratio=0.5, min_lr_ratio=0.1)
    trainer.run(1, schedule, make_reporter(1))
    used = [
        module.ops.situ_glu is clamped_glu
        for name, module in trainer.state.model.named_modules()
        if name.endswith(("mlp", "shared_experts", "block_sparse_moe"))
    ]
    assert len(used) == 5
    assert all(used)
