"""Checkpoint folders: complete or absent, newest kept, nothing half written is read."""

import pytest
import torch

from k3_train.loop import checkpoint


def save(root, step, keep=2):
    return checkpoint.save(root, step, {"a": torch.full((2,), float(step))}, {"tokens": step}, keep)


def test_the_newest_is_read_and_old_ones_go(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    tensors, meta = checkpoint.load(checkpoint.newest(tmp_path))
    assert tensors["a"].tolist() == [100.0, 100.0]
    assert meta == {"step": 100, "tokens": 100}


def test_an_interrupted_save_leaves_the_older_one(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(path):
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "_flush", fail)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path).name == "step-00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(1)}, {"tokens": 0}, 2)
    assert checkpoint.load(checkpoint.newest(tmp_path))[0]["a"].tolist() == [0.0]


def test_no_checkpoint_says_what_to_do(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="k3 train fit"):
        checkpoint.newest(tmp_path / "absent")
