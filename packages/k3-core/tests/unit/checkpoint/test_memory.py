"""A checkpoint of 1 GB loads within its bytes and 300 MB, interpreter and torch included."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from k3_core.config import K3Config, tensor_manifest

LIMIT_BYTES = 300 * 10**6
PROGRAM = """
import resource, sys
from k3_core import K3ForConditionalGeneration as Model
model = Model.from_pretrained(sys.argv[1], dtype="auto")
print(sum(one.nbytes for one in model.state_dict().values()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _write_sparse(config, folder):
    """Shards of zeros; the holes of a sparse file take no disk."""
    shards, size = [[]], 0
    for spec in tensor_manifest(config):
        if size + spec.num_bytes > 300 * 10**6 and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    weight_map = {}
    for number, shard in enumerate(shards):
        name, header, position = f"model-{number}.safetensors", {}, 0
        for spec in shard:
            offsets = [position, position + spec.num_bytes]
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
            weight_map[spec.name], position = name, position + spec.num_bytes
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + position)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_peak_memory_of_loading(tmp_path):
    config = K3Config.preset("k3-test")
    text = replace(config.text, vocab_size=200_000, hidden_size=1024, intermediate_size=16384)
    config = replace(config, text=text)
    _write_sparse(config, tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    num_bytes, peak = map(int, run.stdout.split())
    assert num_bytes > 0.9 * 10**9
    assert peak <= num_bytes + LIMIT_BYTES
