"""`k3 train export`, `inspect`, `doctor` and `fit --init`."""

import json
import shutil

import pytest
import torch

from k3_core.cli.app import run
from k3_core.config import K3Config, count_parameters
from k3_core.model import K3ForConditionalGeneration
from k3_train.loop.checkpoint import load, newest
from k3_train.loop.session import start
from k3_train.tools.inspect import attention_flops


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_config, tiny_data):
    """A run of the tiny model with checkpoints of steps 1 and 2."""
    out = tmp_path_factory.mktemp("run") / "run"
    arguments = [
        f"--data={tiny_data}",
        "--device=cpu",
        f"--set=model.config='{tiny_config}'",
        "--set=data.tokens_per_batch=48",
        "--set=data.max_seq_len=32",
        "--set=run.checkpoint_every=1",
    ]
    assert run(["train", "fit", f"--out={out}", "--steps=2", *arguments]) == 0
    return out, arguments


def parameters(folder):
    model = K3ForConditionalGeneration.from_pretrained(folder)
    return {name: param.detach() for name, param in model.named_parameters()}


def test_a_run_and_a_checkpoint_of_it_are_exported(tmp_path, finished, capsys):
    out, _ = finished
    assert run(["train", "export", str(out), f"--out={tmp_path / 'last'}"]) == 0
    assert "model of step 2" in capsys.readouterr().out
    want, got = parameters(out / "model"), parameters(tmp_path / "last")
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        assert (tmp_path / "last" / name).is_file()
    first = out / "checkpoints/step-00000001"
    assert run(["train", "export", str(first), f"--out={tmp_path / 'first'}"]) == 0
    saved, _ = load(first)
    got = parameters(tmp_path / "first")
    for name, tensor in got.items():  # stored in bfloat16
        torch.testing.assert_close(tensor, saved[f"model.{name}"], rtol=2**-8, atol=1e-9)


def test_what_cannot_be_exported_is_named(tmp_path, finished, capsys):
    assert run(["train", "export", str(tmp_path), f"--out={tmp_path / 'm'}"]) == 2
    assert "neither a run" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert run(["train", "export", str(finished[0]), f"--out={tmp_path / 'full'}"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_init_starts_from_the_weights_of_a_model_folder(tmp_path, finished):
    out, arguments = finished
    fresh = tmp_path / "fresh"
    arguments = [one for one in arguments if "model.config" not in one]
    options = [
        "--steps=1",
        "--set=balance.name=none",
        "--set=optim.muon_lr=0.0",
        "--set=optim.adamw_lr=0.0",
    ]
    options += ["--set=optim.embedding_lr=0.0", f"--init={out / 'model'}"]
    assert run(["train", "fit", f"--out={fresh}", *options, *arguments]) == 0
    want, got = parameters(out / "model"), parameters(fresh / "model")
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]
    assert load(newest(fresh / "checkpoints"))[1]["step"] == 1


def test_inspect_counts_what_the_model_has(tiny_config, make_trainer, tmp_path, capsys):
    assert run(["train", "inspect", "--json", f"--set=model.config='{tiny_config}'"]) == 0
    report = json.loads(capsys.readouterr().out)
    trainer = make_trainer(tmp_path)
    params = dict(trainer.state.model.named_parameters())
    assert sum(row["num_parameters"] for row in report["roles"]) == sum(
        param.numel() for param in params.values()
    )
    assert sum(row["num_tensors"] for row in report["roles"]) == len(params)
    state = report["state_bytes"]
    assert state["parameters"] == sum(param.nbytes for param in params.values())
    optimizer = trainer.state.optimizer.state_tensors()
    assert state["optimizer"] == sum(one.nbytes for one in optimizer.values())
    assert state["histograms"] == trainer.state.balancer.state_tensors()["counts"].nbytes
    counts = count_parameters(K3Config.from_file(tiny_config))
    assert report["dense_flops"] == 6 * counts.active
    experts = next(row for row in report["roles"] if row["role"] == "expert")
    assert sum(experts["blocks"].values()) == 2 * 3 * 4  # layers (one is MTP), matrices, experts


def test_inspect_prints_roles_and_memory(capsys):
    assert run(["train", "inspect", "--preset=k3-mini"]) == 0
    printed = capsys.readouterr().out
    assert "kda_qkv" in printed
    assert "activations not counted" in printed


def test_attention_flops_are_those_of_the_formula(tiny_config):
    config = K3Config.from_file(tiny_config)
    text = config.text
    key_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    # The pairs (query, key) of a causal piece of 100 tokens, 2 FLOPs a multiplication and sum.
    pairs = sum(range(100))
    mla = 2 * pairs * text.num_attention_heads * (key_dim + text.v_head_dim)
    kda = 100 * 4 * 2 * text.linear_attn_config.num_heads * 16 * 16
    assert attention_flops(config, 100) * 100 == pytest.approx(3 * (mla + kda), rel=0.02)


def test_doctor_checks_everything_and_fails_on_damaged_data(tmp_path, tiny_config, tiny_data):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    arguments = ["train", "doctor", f"--set=model.config='{tiny_config}'", f"--data={data}"]
    arguments += [f"--out={tmp_path / 'later'}", "--set=run.device=cpu"]
    assert run(arguments) == 0
    tokens = data / "words/tokens.bin"
    tokens.write_bytes(b"\1" + tokens.read_bytes()[1:])
    assert run(arguments) == 1


def test_doctor_names_each_check(tiny_config, capsys):
    settings = [f"--set=model.config='{tiny_config}'", "--set=run.device=cpu"]
    assert run(["train", "doctor", *settings, "--data=absent"]) == 1
    lines = capsys.readouterr().out.splitlines()
    names = ["versions", "device", "implementations", "step", "disk", "data"]
    assert [line.split()[1] for line in lines] == names
    assert [line.split()[0] for line in lines] == ["ok"] * 5 + ["BAD"]
    assert "kda_chunk." in lines[2]
    assert "k3-test, loss" in lines[3]


def test_the_first_loss_is_that_of_a_uniform_guess(tmp_path, tiny_data, tiny_settings):
    config = tiny_settings(f"data.path='{tiny_data}'", "model.mtp_weight=0.0")
    session = start(config, tmp_path / "run", started=0.0)
    trainer = session.trainer
    trainer.state.model.train()
    metrics, _ = trainer.stepper.step([trainer.sampler.batch(0)], 1.0)
    assert float(metrics["loss"]) == pytest.approx(float(torch.tensor(512.0).log()), abs=0.15)
