"""Rows of the command and of the event of a run: complete, digested, without effect on training."""

import hashlib
import json
import random
import re

import numpy as np
import pytest
import torch

from k3_core.cli.app import run
from k3_train.evaluate.digest import files_digest, parameters_digest
from k3_train.loop.checkpoint import newest
from k3_train.report.run_page import write_report

EVALUATE = (
    'run.events=["evaluate"]',
    'evaluate.suites=["text", "few_shot", "tasks", "long_context"]',
    "evaluate.every=2",
    "evaluate.limit=2",
    'evaluate.options.few_shot={families=["copy"], max_tokens=3}',
    'evaluate.options.tasks={families=["sum"], max_tokens=3}',
    'evaluate.options.long_context={families=["needle"], lengths=[400], depths=[0.5]}',
)
FIGURES = [
    "text/mine/bits_per_byte",
    "text/mine/perplexity",
    "few_shot/copy/accuracy",
    "tasks/sum/low/accuracy",
    "long_context/needle/length400/depth0.5/accuracy",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A table of documents for the suite text."""
    path = tmp_path_factory.mktemp("texts") / "mine.jsonl"
    path.write_text('{"text": "A line."}\n{"text": "And another one, longer."}\n')
    return f"text.sources.mine={{kind='local', path='{path}'}}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_config, tiny_data):
    """A run of two steps with its exported model."""
    out = tmp_path_factory.mktemp("run") / "run"
    sets = [
        f"--set=model.config='{tiny_config}'",
        "--set=data.tokens_per_batch=48",
        "--set=data.max_seq_len=32",
        "--set=run.events=[]",
        "--set=run.checkpoint_every=1",
    ]
    options = [f"--out={out}", "--steps=2", f"--data={tiny_data}", "--device=cpu"]
    assert run(["train", "fit", *options, *sets]) == 0
    return out


@pytest.fixture
def evaluate(source):
    """A function that runs the command with the suite text, and others after it."""

    def call(model, *arguments):
        options = ["--suite=text", *arguments, f"--set={source}", "--device=cpu"]
        return run(["train", "evaluate", str(model), *options])

    return call


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_says_how_it_came_about(tmp_path, finished, evaluate, capsys):
    out = tmp_path / "rows" / "all.jsonl"
    model = finished / "model"
    arguments = [
        model, "--suite=tasks", "--effort=low", "--effort=max", "--seed=7", "--limit=2",
        "--set=tasks.families=['sum']", "--set=tasks.max_tokens=2", f"--out={out}",
    ]  # fmt: skip
    assert evaluate(*arguments) == 0
    shown = capsys.readouterr().out
    rows = rows_of(out)
    assert [(row["suite"], row["metric"], row["effort"]) for row in rows] == [
        ("text", "bits_per_byte", None),
        ("text", "perplexity", None),
        ("tasks", "accuracy", "low"),
        ("tasks", "accuracy", "max"),
    ]
    for row in rows:
        assert re.fullmatch(r"k3-train \d+\.\d+.*", row["harness"])
        assert (row["seed"], row["count"], row["model"]) == (7, 2, str(model))
        assert row["checkpoint"] == files_digest(model)
        assert row["low"] <= row["value"] <= row["high"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["date"])
    assert files_digest(model) in shown
    assert "bits_per_byte" in shown
    assert evaluate(*arguments) == 0  # the file goes on
    assert [row["value"] for row in rows_of(out)] == 2 * [row["value"] for row in rows]


def test_the_digest_of_files_is_that_of_sha256sum(tmp_path):
    (tmp_path / "sub").mkdir()
    lines = []
    for name in ("a.safetensors", "sub/b.safetensors", "z.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
        lines.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    (tmp_path / "config.json").write_text("{}")
    assert files_digest(tmp_path) == f"files-sha256:{expected}"
    (tmp_path / "a.safetensors").write_bytes(b"b")
    assert files_digest(tmp_path) != f"files-sha256:{expected}"


def test_the_digest_of_parameters_follows_every_value():
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    first = parameters_digest(layer)
    assert parameters_digest(layer) == first
    layer.bias.data[1] += 1
    assert parameters_digest(layer) != first


def test_a_run_stands_for_its_newest_checkpoint(tmp_path, finished, evaluate):
    out = tmp_path / "rows.jsonl"
    checkpoints = [finished / "checkpoints" / f"step-0000000{step}" for step in (1, 2)]
    assert newest(finished / "checkpoints") == checkpoints[1]
    for model in (finished, *checkpoints):
        assert evaluate(model, "--limit=1", f"--out={out}") == 0
    of_run, of_first, of_second = (row for row in rows_of(out) if row["metric"] == "perplexity")
    assert of_run["checkpoint"] == of_second["checkpoint"] != of_first["checkpoint"]
    assert of_run["model"] == "run/step-00000002"
    assert of_run["value"] == of_second["value"] != of_first["value"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--suite=taks"], "no suite 'taks'. Did you mean 'tasks'"),
        (["--set=tasks.limit=3"], "'tasks' is not a suite that is asked for"),
        (["--set=text.windw=3"], "text.windw"),
        (["--effort=medium"], "'medium' is not one of low, high, max"),
        (["--dtype=bfloat16"], "a checkpoint is float32"),
    ],
)
def test_bad_arguments_are_named(finished, evaluate, capsys, arguments, words):
    assert evaluate(finished, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_missing_model_or_suite_is_named(tmp_path, evaluate, capsys):
    assert evaluate(tmp_path / "none") == 2
    assert "not a bundled model" in capsys.readouterr().err
    assert run(["train", "evaluate", "k3-nano"]) == 2
    assert "few_shot, lm_eval, long_context" in capsys.readouterr().err


def test_an_evaluation_changes_nothing_of_the_run(tmp_path, make_trainer, run, tiny_data, source):
    data = f"data.path='{tiny_data}'"
    states = []
    for name, settings in (
        ("plain", ["run.events=[]"]),
        ("measured", [*EVALUATE, f"evaluate.options.{source}"]),
    ):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        trainer = make_trainer(tmp_path / name, data, *settings)
        run(trainer, 5)
        assert trainer.state.model.training
        states.append((trainer.state.tensors(), random.random(), np.random.random()))
    (left, *numbers), (right, *others) = states
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
    assert numbers == others
    plain, measured = (rows_of(tmp_path / name / "run.jsonl") for name in ("plain", "measured"))
    for one, other in zip(plain, measured, strict=True):
        for key in ("loss", "max_over_mean_load", "dead_experts", "grad_norm"):
            assert one[key] == other[key], "loads count training passes only"
    assert [all(name in row for name in FIGURES) for row in measured] == [False, True] * 2 + [False]
    found = rows_of(tmp_path / "measured/evaluation.jsonl")
    assert [row["step"] for row in found] == [2] * 5 + [4] * 5
    assert [row["value"] for row in found[:5]] == [measured[1][name] for name in FIGURES]
    assert found[0]["checkpoint"].startswith("parameters-sha256:")
    assert found[0]["checkpoint"] == found[4]["checkpoint"] != found[5]["checkpoint"]


def test_a_resumed_run_has_every_evaluation_once_and_the_report_its_curve(
    tmp_path, make_trainer, run, tiny_data, source
):
    settings = (f"data.path='{tiny_data}'", 'run.events=["evaluate"]', "evaluate.every=1")
    settings += (f"evaluate.options.{source}", "run.checkpoint_every=1")
    first = make_trainer(tmp_path, *settings)
    run(first, 3)
    (tmp_path / "checkpoints/step-00000003").rename(tmp_path / "lost")
    again = make_trainer(tmp_path, *settings)
    again.resume()
    run(again, 3)
    found = rows_of(tmp_path / "evaluation.jsonl")
    assert [row["step"] for row in found] == [1, 1, 2, 2, 3, 3]
    path = tmp_path / "run.jsonl"
    rows = rows_of(path)
    assert all(row["text/mine/perplexity"] > 1 for row in rows)
    del rows[2]["text/mine/perplexity"]  # as where the last row is not due
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    for name in ("text/mine/bits_per_byte", "text/mine/perplexity"):
        assert f'aria-label="{name}"' in page


def test_unknown_suites_of_an_event_are_refused_at_the_start(tmp_path, make_trainer):
    with pytest.raises(Exception, match="no suite 'texts'"):
        make_trainer(tmp_path, 'run.events=["evaluate"]', 'evaluate.suites=["texts"]')
