"""Settings of a run: order of the layers, errors, the resolved file."""

import dataclasses
from pathlib import Path

import pytest

from k3_core.config import ConfigError, read_toml
from k3_train.config import TrainConfig, load_dataclass, load_train_config, write_toml

ROOT = Path(__file__).parents[4]


def test_defaults_then_shipped_preset_then_file_then_set(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[run]\nseed = 3\nlog_every = 7\n[optim]\nmuon_lr = 0.5\n")
    config = load_train_config(
        preset="k3-test", file=file, overrides=["run.seed=4", "data.path=some/where"]
    )
    assert config.model.preset == "k3-test"
    assert (config.run.seed, config.run.log_every, config.optim.muon_lr) == (4, 7, 0.5)
    assert config.run.checkpoint_every == 200  # shipped for k3-test, 1000 otherwise
    assert config.data.path == "some/where"
    assert config.optim.weight_decay == TrainConfig().optim.weight_decay


def test_the_preset_of_the_bundled_model_is_what_made_it():
    """One command repeats the run: only the folder of the data and the planned horizon differ."""
    used = load_train_config(file=ROOT / "docs/k3-nano/config.resolved.toml")
    preset = load_train_config(preset="k3-nano", overrides=[f"data.path='{used.data.path}'"])
    horizon = dataclasses.replace(preset.schedule, total_steps=preset.run.steps)
    assert dataclasses.replace(preset, schedule=horizon) == used


@pytest.mark.parametrize("preset", ["k3-test", "k3-nano"])
def test_shipped_presets_are_read(preset):
    assert load_train_config(preset=preset).model.preset == preset


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stepps=3", "Did you mean 'steps'"),
        ("rum.steps=3", "Did you mean 'run'"),
        ("run.steps='many'", "run.steps"),
        ("run.accumulation=0", "at least 1"),
        ("optim.clip_norm=-1.0", "at least 0"),
        ("optim.muon_lr=-0.1", "at least 0"),
        ("optim.muon_lr=nan", "a finite number"),
        ("optim.beta1=1.0", "between 0 and"),
        ("schedule.warmup_ratio=3.0", "between 0 and 1"),
    ],
)
def test_a_bad_setting_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_train_config(overrides=[override])


def test_the_resolved_file_reads_back_as_the_same_settings(tmp_path):
    config = load_train_config(
        overrides=[
            "data.weights.chat=0.25",
            "data.path='a \"quoted\" \\\\ path \N{GRINNING FACE}'",
            "optim.eps=1e-12",
            'impl."kernel.kda_chunk"=kda_chunk.reference',
        ]
    )
    config = dataclasses.replace(config, impl={"kernel.kda_chunk": "kda_chunk.reference"})
    write_toml(config, tmp_path / "config.resolved.toml")
    assert load_dataclass(TrainConfig, read_toml(tmp_path / "config.resolved.toml")) == config
