"""The options of `k3 serve` for the prefix cache: sizes, tiers, and what cannot be made."""

from pathlib import Path

import pytest

from k3_core.cli.app import run
from k3_core.errors import K3Error
from k3_serve.engine.core import ContinuousEngine
from k3_serve.ops.sizes import CacheChoice, parse_size
from k3_serve.testing import SteppedEngine, tiny_model


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("2GiB", 2**31),
        ("1.5 gb", 1_500_000_000),
        ("3kib", 3072),
        ("7B", 7),
        ("1TiB", 2**40),
    ],
)
def test_a_size_is_a_number_with_a_unit(text, size):
    assert parse_size(text, "--cpu-cache") == size


@pytest.mark.parametrize("text", ["", "many", "4XB", "-1GB", "1e9", "GB", "1GB2"])
def test_another_size_is_named_with_what_is_allowed(text):
    with pytest.raises(K3Error, match=r"--cpu-cache is .*as in 512MB or 2GiB"):
        parse_size(text, "--cpu-cache")


def test_what_is_not_given_is_the_engines_default(tmp_path):
    assert CacheChoice.read("", "", None, "", None, None).options() == {
        "cpu_cache_bytes": 0,
        "disk_cache": None,
    }
    given = CacheChoice.read("1GB", "2KB", tmp_path, "3MB", 32, 99).options()
    assert given == {
        "cache_bytes": 10**9,
        "cpu_cache_bytes": 2000,
        "disk_cache": tmp_path,
        "disk_cache_bytes": 3 * 10**6,
        "unit": 32,
        "token_budget": 99,
    }


def test_a_folder_and_its_size_belong_together(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(K3Error, match="--disk-cache-size needs --disk-cache"):
        CacheChoice.read("", "", None, "1GB", None, None)
    with pytest.raises(K3Error, match="is not a folder"):
        CacheChoice.read("", "", file, "", None, None)


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path, capsys):
    model = tiny_model()
    with pytest.raises(K3Error, match="a CPU cache of 10 bytes does not hold one checkpoint"):
        ContinuousEngine(model, unit=4, num_pages=60, cpu_cache_bytes=10)
    with pytest.raises(K3Error, match="a disk cache of 10 bytes does not hold one checkpoint"):
        ContinuousEngine(model, unit=4, num_pages=60, disk_cache=tmp_path, disk_cache_bytes=10)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(K3Error, match="cannot use the cache folder"):
        ContinuousEngine(model, unit=4, num_pages=60, disk_cache=file / "below")
    assert run(["serve", "--port", "0", "--cache-size", "1KB"]) == 2
    assert "the engine cannot be made" in capsys.readouterr().err


def test_a_folder_alone_is_written_through_host_memory(tmp_path: Path):
    engine = SteppedEngine(tiny_model(), unit=4, num_pages=60, disk_cache=tmp_path)
    assert [tier.tier for tier in engine.cache_stats().tiers] == ["cpu", "disk"]
    engine._tiers.close()
