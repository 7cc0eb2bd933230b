"""The commands `k3 train fit` and `k3 train resume`, on a tiny model (issue 2, acceptance)."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from k3_core.cli.app import run
from k3_core.config.quantization import released_quantization
from k3_train.config import load_train_config
from k3_train.loop.checkpoint import load, newest
from k3_train.loop.corpus import build_default, open_sampler, open_tokenizer
from k3_train.loop.trainer import Trainer


@pytest.fixture
def arguments(tiny_config, tiny_data):
    return [
        f"--data={tiny_data}",
        "--device=cpu",
        f"--set=model.config='{tiny_config}'",
        "--set=data.tokens_per_batch=48",
        "--set=data.max_seq_len=32",
        "--set=run.log_every=1",
    ]


def fit(out, *options):
    assert run(["train", "fit", f"--out={out}", *options]) == 0


def tensors_of(folder):
    state, _ = load(newest(folder / "checkpoints"))
    exported = load_file(folder / "model/model.safetensors")
    return state | {f"exported {name}": tensor for name, tensor in exported.items()}


def test_two_and_two_steps_equal_four_by_the_commands(tmp_path, arguments):
    fit(tmp_path / "straight", "--steps=4", *arguments)
    fit(tmp_path / "parts", "--steps=2", *arguments)
    assert run(["train", "resume", str(tmp_path / "parts"), "--steps=2"]) == 0
    want, got = tensors_of(tmp_path / "straight"), tensors_of(tmp_path / "parts")
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]
    straight = (tmp_path / "straight/config.resolved.toml").read_text()
    assert straight == (tmp_path / "parts/config.resolved.toml").read_text()
    assert "steps = 4" in straight.replace('"', "")


@pytest.mark.parametrize(
    ("settings", "steps", "horizon"),
    [
        (["--steps=1"], 1, 1000),
        (["--set=run.steps=2"], 2, 2),
        (["--set=run.steps=7", "--steps=1"], 1, 7),
    ],
)
def test_the_horizon_is_the_planned_length_or_a_fixed_one(
    tmp_path, arguments, settings, steps, horizon
):
    """A run in parts has the learning rates of one in a piece."""
    fit(tmp_path / "run", *arguments, *settings)
    used = load_train_config(file=tmp_path / "run/config.resolved.toml")
    assert (used.run.steps, used.schedule.total_steps) == (steps, horizon)


def test_minutes_fix_the_number_of_steps_and_write_it(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(Trainer, "measure_step_seconds", lambda self, *_, **__: 10.0)
    fit(tmp_path / "run", "--minutes=0.75", *arguments)
    rows = [json.loads(line) for line in (tmp_path / "run/run.jsonl").read_text().splitlines()]
    assert 1 <= len(rows) <= 3  # 45 s, less the reserve and the set-up, at 10 s a step
    planned = f'"steps" = {rows[-1]["step"]}'
    resolved = (tmp_path / "run/config.resolved.toml").read_text()
    assert planned in resolved
    assert f'"total_steps" = {rows[-1]["step"]}' in resolved
    assert (tmp_path / "run/model/tiktoken.model").is_file()
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["device"] == "cpu"


def test_minutes_that_fit_no_step_are_refused(tmp_path, arguments, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "measure_step_seconds", lambda self, *_, **__: 10.0)
    out = tmp_path / "run"
    assert run(["train", "fit", f"--out={out}", "--minutes=0.2", *arguments]) == 2
    assert "no time for a step" in capsys.readouterr().err


def test_a_folder_with_a_run_is_refused(tmp_path, arguments, capsys):
    fit(tmp_path / "run", "--steps=1", *arguments)
    assert run(["train", "fit", f"--out={tmp_path / 'run'}", "--steps=1", *arguments]) == 2
    assert "k3 train resume" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--steps=1", "--minutes=1"], ["--steps=0"]])
def test_a_length_is_needed_and_only_one(tmp_path, arguments, options, capsys):
    assert run(["train", "fit", f"--out={tmp_path / 'run'}", *options, *arguments]) == 2
    assert "--steps" in capsys.readouterr().err


def test_a_tokenizer_of_another_size_is_refused(tiny_data):
    with pytest.raises(ValueError, match="has 512 ids, the model 600"):
        open_tokenizer(tiny_data, 600)


def test_a_folder_without_data_is_refused(tmp_path, tiny_settings):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        open_tokenizer(tmp_path, 512)
    with pytest.raises(ValueError, match="holds no token file"):
        open_sampler(tiny_settings(), tmp_path)


def test_weights_name_token_files(tiny_data, tiny_settings):
    sampler = open_sampler(tiny_settings("data.weights.words=2.0"), tiny_data)
    assert sum(sampler.batch(0).seqlens) == tiny_settings().data.tokens_per_batch
    with pytest.raises(ValueError, match=r"\['chat'\] are not among .*\['words'\]"):
        open_sampler(tiny_settings("data.weights.chat=1.0"), tiny_data)


def test_the_default_corpus_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setattr("k3_train.loop.corpus.DEFAULT_FILES", 2)
    monkeypatch.setattr("k3_train.loop.corpus.DEFAULT_CHAT_TOKENS", 100)
    build_default(tmp_path, 512)
    assert {path.parent.name for path in tmp_path.glob("*/tokens.bin")} == {"chat", "stdlib"}
    stamp = (tmp_path / "stdlib/tokens.bin").stat().st_mtime_ns
    build_default(tmp_path, 512)
    assert (tmp_path / "stdlib/tokens.bin").stat().st_mtime_ns == stamp
    assert open_tokenizer(tmp_path, 512).decode([104, 105]) == "hi"


def test_a_quantised_configuration_is_exported_packed_and_kept_whole(
    tmp_path, tiny_config, arguments
):
    config = json.loads(tiny_config.read_text())
    config["text_config"]["quantization_config"] = released_quantization()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    fit(tmp_path / "run", "--steps=1", *arguments, f"--set=model.config='{path}'")
    tensors = tensors_of(tmp_path / "run")
    packed = [name for name in tensors if name.endswith(".w1.weight_packed")]
    whole = [n for n in tensors if n.startswith("model.") and n.endswith(".experts.w1")]
    assert {tensors[name].dtype for name in packed} == {torch.uint8}
    assert {tensors[name].dtype for name in whole} == {torch.float32}
    assert len(packed) == 4 * len(whole)


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_zero(tmp_path, arguments, number):
    out = tmp_path / "run"
    code = "import sys; from k3_core.cli.app import run; sys.exit(run(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "fit", f"--out={out}", "--steps=100000", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not (out / "run.jsonl").is_file() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert f"stopped by {number.name}" in printed
    assert load(newest(out / "checkpoints"))[1]["step"] >= 1
