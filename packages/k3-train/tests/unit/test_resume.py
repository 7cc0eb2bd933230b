"""Exact resume in the middle of things, and saves that go on beside the training (training 5)."""

import errno
import json

import pytest
import torch

from k3_train.events.base import TrainerEvent
from k3_train.loop import checkpoint
from k3_train.loop.checkpoint import CheckpointError


def different(left, right):
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def batches(trainer, step):
    return [trainer.sampler.batch(step, micro) for micro in range(3)]


@pytest.mark.parametrize("balancer", ["quantile_histogram", "quantile_exact"])
def test_a_state_between_two_micro_batches_goes_on_bit_for_bit(tmp_path, make_trainer, balancer):
    settings = (f"balance.name='{balancer}'", "run.accumulation=3")
    straight = make_trainer(tmp_path / "straight", *settings)
    stopped = make_trainer(tmp_path / "stopped", *settings)
    resumed = make_trainer(tmp_path / "resumed", *settings, "run.seed=5")
    want = [straight.stepper.step(batches(straight, step), 1.0) for step in (0, 1)]
    stopped.stepper.step(batches(stopped, 0), 1.0)
    stopped.stepper.accumulate(batches(stopped, 1), until=2)
    assert stopped.state.meta == {"step": 1, "tokens": 72, "micro": 2}
    folder = checkpoint.save(tmp_path, 1, stopped.state.tensors(), stopped.state.meta, 1)
    saved, _ = checkpoint.load(folder)
    assert any(name.startswith("balancer.") and bool(saved[name].any()) for name in saved)
    resumed.state.restore(*checkpoint.load(folder))
    assert not different(stopped.state.tensors(), resumed.state.tensors())
    got = resumed.stepper.step(batches(resumed, 1), 1.0)
    assert not different(want[1][0], got[0])
    assert torch.equal(want[1][1], got[1])
    assert not different(straight.state.tensors(), resumed.state.tensors())
    assert resumed.state.meta == straight.state.meta


class Told(TrainerEvent):
    """Remembers the checkpoints that it was told of."""

    def __init__(self):
        self.folders = []

    def saved(self, trainer, folder):
        assert checkpoint.load(folder)[1]["step"] == int(folder.name.removeprefix("step-"))
        self.folders.append(folder.name)


def test_saves_go_on_beside_the_training_and_each_is_told_when_complete(
    tmp_path, make_trainer, run
):
    trainer = make_trainer(tmp_path, "run.checkpoint_every=1", "run.keep_checkpoints=2")
    told = trainer.events.by_name["told"] = Told()
    states = {}

    class Copy(TrainerEvent):
        def __init__(self):
            pass

        def stepped(self, trainer, metrics):
            states[trainer.state.step] = trainer.state.snapshot()[0]

    trainer.events.by_name["copy"] = Copy()
    run(trainer, 4)
    assert told.folders == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    kept = sorted(path.name for path in trainer.checkpoints.iterdir())
    assert kept == ["step-00000003", "step-00000004"]
    for name in kept:
        tensors, meta = checkpoint.load(trainer.checkpoints / name)
        assert not different(tensors, states[meta["step"]])


def test_a_save_that_fails_is_noted_and_tried_again(tmp_path, make_trainer, monkeypatch, run):
    trainer = make_trainer(tmp_path, "run.checkpoint_every=1")
    flush, failing = checkpoint._flush, iter([True])

    def fail_once(path):
        if next(failing, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    monkeypatch.setattr(checkpoint, "_flush", fail_once)
    printed = run(trainer, 3)
    assert "checkpoint of step 1 was not saved" in printed
    assert "(training goes on)" in printed
    assert checkpoint.load(checkpoint.newest(trainer.checkpoints))[1]["step"] == 3
    rows = [json.loads(line)["step"] for line in trainer.rows_path.read_text().splitlines()]
    assert rows == [1, 2, 3]


def test_the_last_save_must_come_through(tmp_path, make_trainer, monkeypatch, run):
    trainer = make_trainer(tmp_path)
    run(trainer, 1)

    def fail(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", fail)
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        run(trainer, 2)
    monkeypatch.undo()
    assert checkpoint.load(checkpoint.newest(trainer.checkpoints))[1]["step"] == 1
