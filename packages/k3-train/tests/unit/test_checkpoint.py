"""Checkpoint folders: complete or absent, newest kept, nothing half written is read."""

import errno
import gc
import json
import os
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file

from k3_train.loop import checkpoint
from k3_train.loop.checkpoint import CheckpointError
from k3_train.loop.saver import CheckpointSaver

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def state(step):
    return {"a": torch.full((2,), float(step)), "b.c": torch.tensor(step), "none": torch.zeros(0)}


def save(root, step, keep=2):
    return checkpoint.save(root, step, state(step), {"tokens": 2 * step}, keep)


def assert_holds(folder, step):
    tensors, meta = checkpoint.load(folder)
    assert meta == {"step": step, "tokens": 2 * step}
    assert tensors.keys() == state(step).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(step).items())


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_read_and_old_ones_go(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert_holds(checkpoint.newest(tmp_path), 100)


def test_nothing_of_it_is_pickled(tmp_path):
    folder = save(tmp_path, 1)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert b"\x80\x02" not in {path.read_bytes()[:2] for path in files}


def test_large_states_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8)
    folder = save(tmp_path, 1)
    assert len(list(folder.glob("state/*.safetensors"))) == 2
    assert_holds(folder, 1)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_killed_at_any_change_of_the_disk_a_whole_state_is_there(tmp_path, keep, again):
    """A child process that ends at its n-th change, for every n until it comes through."""
    save(tmp_path, 4, keep)
    steps = (4,) if again else (4, 5)
    for number in range(1, 100):
        child = os.fork()
        if not child:
            die_at_change(number)
            save(tmp_path, steps[-1], keep)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = checkpoint.load(checkpoint.newest(tmp_path))[1]["step"]
        assert_holds(checkpoint.newest(tmp_path), found)
        assert found in steps
        if code == 0:
            break
        assert code == 9
    assert number >= 8  # it was killed that many times
    assert found == steps[-1]
    assert len(names(tmp_path)) == min(keep, len(steps))


def die_at_change(number):
    changes = iter(range(1, number))

    def audit(event, arguments):
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or is_write) and next(changes, None) is None:
            os._exit(9)

    sys.addaudithook(audit)


def test_a_full_disk_is_named_and_costs_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", fail)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved .*No space left on device"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_failure_inside_the_writer_is_named(tmp_path, monkeypatch):
    def fail(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.HuggingFaceStorageWriter, "write_data", fail)
    with pytest.raises(CheckpointError, match=r"not saved in .*No space left on device"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_what_does_not_fit_on_the_disk_is_not_begun(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 3})()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="it needs 16 bytes, 3 are free"):
        save(tmp_path, 1)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    shard = next(folder.glob("state/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="missing, cut off or changed"):
        checkpoint.load(folder)


def test_a_checkpoint_of_the_first_layout_is_read(tmp_path):
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    save_file(state(7), folder / "state.safetensors")
    (folder / "meta.json").write_text(json.dumps({"step": 7, "tokens": 14}))
    assert_holds(checkpoint.newest(tmp_path), 7)


def test_no_checkpoint_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="k3 train fit"):
        checkpoint.newest(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoint.load(tmp_path)


def test_what_is_saved_is_the_state_of_the_moment(tmp_path):
    saver = CheckpointSaver(tmp_path, 2, torch.device("cpu"))
    for step in (1, 2):
        tensors = state(step)
        saver.start(step, tensors, {"tokens": 2 * step})
        tensors["a"].fill_(-1.0)
        assert_holds(saver.collect(wait=True), step)
        assert saver.collect(wait=True) is None
    saver.close()


def test_a_failed_save_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    saver = CheckpointSaver(tmp_path / "file", 2, torch.device("cpu"))
    saver.start(1, state(1), {})
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        saver.collect(wait=True)
    assert saver.collect(wait=True) is None
    saver.close()


def test_saving_again_and_again_leaks_nothing(tmp_path):
    def used():
        gc.collect()
        tensors = sum(1 for one in gc.get_objects() if type(one) is torch.Tensor)
        return tensors, threading.active_count(), len(os.listdir("/proc/self/fd"))

    saver = CheckpointSaver(tmp_path, 1, torch.device("cpu"))
    tensors = state(0)
    counts = []
    for step in range(5):
        saver.start(step, tensors, {})
        saver.collect(wait=True)
        counts.append(used())
    assert len(set(counts[1:])) == 1
    saver.close()
    assert threading.active_count() == counts[-1][1] - 1
