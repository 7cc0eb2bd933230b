"""The cache of launch configurations: what is read, what is written, what is refused."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from k3_core.errors import K3Error
from k3_kernels import tuning
from k3_kernels.tuning import Entry, cache_file, read_cache, tuned, write_cache

GPU = "NVIDIA H200 (141 GB)"


@dataclass(frozen=True)
class Blocks:
    """A configuration like those of the ops."""

    values: int
    warps: int = 4


class Tile(NamedTuple):
    """The other form that configurations have."""

    rows: int
    warps: int


DEFAULT = Blocks(16, 2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, a GPU by name, and nothing remembered before or after."""
    monkeypatch.setenv("K3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "device_name", lambda: GPU)
    monkeypatch.setattr(tuning, "triton_version", lambda: "3.6.0")
    tuning.forget()
    yield cache_file(GPU)
    tuning.forget()


def entry(op="kda_step", shape=(128, 128), config=None, microseconds=5.0):
    return Entry(op, shape, config or {"values": 32, "warps": 8}, microseconds, 6.0)


def test_without_a_file_the_default_stays():
    assert tuned("kda_step", (128, 128), DEFAULT) is DEFAULT


def test_what_was_written_is_used_for_its_op_and_shape_only(cache):
    write_cache(cache, GPU, [entry(), entry("moe", (16, "mx"), {"rows": 64, "warps": 4})])
    assert cache.name == "kernels-NVIDIA-H200-141-GB-.json"
    assert tuned("kda_step", (128, 128), DEFAULT) == Blocks(32, 8)
    assert tuned("moe", (16, "mx"), Tile(32, 8)) == Tile(64, 4)
    assert tuned("kda_step", (64, 64), DEFAULT) is DEFAULT
    assert tuned("kda_chunk", (128, 128), DEFAULT) is DEFAULT


def test_another_triton_reads_nothing_of_it_and_keeps_it(cache, monkeypatch):
    write_cache(cache, GPU, [entry()])
    monkeypatch.setattr(tuning, "triton_version", lambda: "3.7.1")
    tuning.forget()
    assert tuned("kda_step", (128, 128), DEFAULT) is DEFAULT
    write_cache(cache, GPU, [entry(config={"values": 8, "warps": 1})])
    assert tuned("kda_step", (128, 128), DEFAULT) == Blocks(8, 1)
    assert [one["triton"] for one in read_cache(cache, GPU)] == ["3.6.0", "3.7.1"]


def test_a_second_measurement_replaces_the_first(cache):
    write_cache(cache, GPU, [entry(), entry(shape=(64, 64))])
    assert tuned("kda_step", (128, 128), DEFAULT).warps == 8
    write_cache(cache, GPU, [entry(config={"values": 64, "warps": 1})])
    assert tuned("kda_step", (128, 128), DEFAULT) == Blocks(64, 1)
    assert tuned("kda_step", (64, 64), DEFAULT) == Blocks(32, 8)


def test_the_file_is_read_once(cache):
    write_cache(cache, GPU, [entry()])
    tuned("kda_step", (64, 64), DEFAULT)
    cache.unlink()
    assert tuned("kda_step", (128, 128), DEFAULT) == Blocks(32, 8)


def test_without_a_gpu_nothing_is_read(cache, monkeypatch):
    cache.parent.mkdir(parents=True)
    cache.write_text("broken")
    monkeypatch.setattr(tuning, "device_name", lambda: None)
    assert tuned("kda_step", (128, 128), DEFAULT) is DEFAULT


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"format": "k3-kernels-tuning-1", "device": "x", "entries": [{"op": "kda_step"}]}',
        '{"format": "k3-kernels-tuning-1", "device": "another GPU", "entries": []}',
        json.dumps({"format": "k3-kernels-tuning-9", "device": GPU, "entries": []}),
    ],
)
def test_a_broken_or_foreign_file_is_named(cache, text):
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.raises(K3Error, match=r"kernels-NVIDIA-H200.*delete it"):
        tuned("kda_step", (128, 128), DEFAULT)
    with pytest.raises(K3Error, match="delete it"):
        write_cache(cache, GPU, [entry()])
    assert cache.read_text() == text


def test_a_configuration_of_another_version_is_named(cache):
    write_cache(cache, GPU, [entry(config={"values": 32, "stages": 2})])
    with pytest.raises(K3Error, match=r"stages.*takes.*warps.*k3 kernels tune --op kda_step"):
        tuned("kda_step", (128, 128), DEFAULT)


def test_a_failed_write_leaves_the_old_file(cache, monkeypatch):
    write_cache(cache, GPU, [entry()])
    before = cache.read_text()

    def measured():
        yield entry(shape=(64, 64))
        raise RuntimeError("the device was lost")

    with pytest.raises(RuntimeError, match="lost"):
        write_cache(cache, GPU, measured())
    assert cache.read_text() == before
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("K3_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_folder() == tmp_path / "k3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.cache_folder() == tmp_path / "home" / ".cache" / "k3"
