"""Shards and their index."""

import json

import pytest
import torch
from safetensors.torch import load_file

from k3_core import K3ForConditionalGeneration as Model
from k3_core.checkpoint import CheckpointError, CheckpointFolder
from k3_core.checkpoint.save import parse_size


@pytest.fixture
def sharded(golden, tmp_path):
    Model.from_pretrained(golden("mm_tiny")).save_pretrained(tmp_path / "s", max_shard_size="300KB")
    return tmp_path / "s"


def test_shards_are_small_complete_and_indexed(golden, sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert [one.name for one in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    merged = {}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 300_000
        assert all(index["weight_map"][name] == shard.name for name in tensors)
        merged.update(tensors)
    source = load_file(golden("mm_tiny") / "model.safetensors")
    assert merged.keys() == source.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in source.items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in source.values())


def test_sharded_load_equals_the_single_file(golden, sharded):
    whole = Model.from_pretrained(golden("mm_tiny")).state_dict()
    parts = Model.from_pretrained(sharded).state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_saving_again_with_other_shards_removes_the_old_ones(sharded):
    model = Model.from_pretrained(sharded)
    model.save_pretrained(sharded)
    assert sorted(file.name for file in sharded.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    model.save_pretrained(sharded, max_shard_size=500_000)
    assert not (sharded / "model.safetensors").exists()
    assert len(CheckpointFolder.open(sharded).entries) == 360


def test_a_missing_shard_is_named(sharded):
    (sharded / sorted(sharded.glob("model-*"))[1].name).unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-\d+\.safetensors is missing"):
        Model.from_pretrained(sharded)


def test_an_index_that_does_not_fit_its_shards_is_named(sharded):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "language_model.lm_head.weight"
    shard = index["weight_map"].pop(name)
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{shard} holds {name} that"):
        Model.from_pretrained(sharded)
    index["weight_map"][name] = "model-00001-of-00001.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="shard model-00001-of-00001"):
        Model.from_pretrained(sharded)
    index["weight_map"] = {**index["weight_map"], name: shard, "ghost.weight": shard}
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"ghost\.weight is missing in .*{shard}"):
        Model.from_pretrained(sharded)
    index["weight_map"][name] = "../elsewhere.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Model.from_pretrained(sharded)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1 GiB", 2**30), ("2.5MB", 2_500_000), (1234, 1234), ("77", 77)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["five", "5TBB", "", "0GB", -1])
def test_bad_sizes_are_refused(text):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        parse_size(text)
