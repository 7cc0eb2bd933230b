"""Loggers: TensorBoard files, and the two trackers through stand-ins for their libraries."""

import sys
import types

import pytest

from k3_core.config import ConfigError

LOSSES = {"train/loss", "train/lr", "train/grad_norm", "train/max_over_mean_load", "train/tokens"}


@pytest.fixture(params=["trackio", "wandb"])
def library(request, monkeypatch):
    """A module that remembers how it was called."""
    module = types.ModuleType(request.param)
    module.calls = []
    module.init = lambda **options: module.calls.append(("init", options))
    module.log = lambda values, step: module.calls.append(("log", values, step))
    module.finish = lambda: module.calls.append(("finish",))
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_a_tracker_gets_the_settings_every_row_and_the_end(tmp_path, make_trainer, library, run):
    name = library.__name__
    trainer = make_trainer(tmp_path / "my.run", f"run.loggers=['{name}']", "log.project=mine")
    run(trainer, 2)
    (_, options), *rows, end = library.calls
    assert (options["project"], options["name"]) == ("mine", "my.run")
    assert options["config"]["optim"]["momentum"] == 0.95
    assert options.get("id") == ("my-run" if name == "wandb" else None)
    assert [step for _, _, step in rows] == [1, 2]
    assert all({"loss", "lr", "tokens"} <= values.keys() for _, values, _ in rows)
    assert end == ("finish",)


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_an_absent_library_is_named_before_the_run_begins(
    tmp_path, make_trainer, monkeypatch, name
):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'k3-train\[{name}\]'"):
        make_trainer(tmp_path, f"run.loggers=['{name}']")


def test_tensorboard_files_have_the_curves(tmp_path, make_trainer, run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ("run.loggers=['tensorboard']", "run.checkpoint_every=2")
    run(make_trainer(tmp_path, *settings), 3)
    resumed = make_trainer(tmp_path, *settings)
    resumed.resume()
    run(resumed, 4)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) >= LOSSES
    assert [one.step for one in found.Scalars("train/loss")] == [1, 2, 3, 4]
    assert found.Scalars("train/tokens")[-1].value == 96
