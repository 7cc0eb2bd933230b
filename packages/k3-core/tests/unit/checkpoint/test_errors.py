"""Every broken checkpoint is refused with the tensor's name, the file and the next step."""

import json
import struct

import pytest
import torch

from k3_core import K3ForConditionalGeneration as Model
from k3_core.checkpoint import CheckpointError
from k3_core.config import ConfigError

NORM = "model.layers.3.input_layernorm.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight"
A_LOG = "language_model.model.layers.1.self_attn.A_log"


def _refused(path, match, **options):
    with pytest.raises(CheckpointError, match=match) as caught:
        Model.from_pretrained(path, **options)
    return str(caught.value)


def test_missing_tensor(folder_of):
    folder = folder_of("text_tiny")
    del folder.tensors[NORM]
    message = _refused(folder.write(), f"missing tensor {NORM}")
    assert "Download the files again" in message and "k3 inspect" in message


def test_extra_tensor(folder_of):
    folder = folder_of("text_tiny")
    folder.tensors["model.layers.3.ghost.weight"] = torch.zeros(3)
    message = _refused(folder.write(), r"extra tensor model\.layers\.3\.ghost\.weight: in .*saf")
    assert "correct it, or remove the tensor" in message


def test_wrong_shape(folder_of):
    folder = folder_of("text_tiny")
    folder.tensors[NORM] = torch.zeros(63, dtype=torch.bfloat16)
    _refused(folder.write(), rf"shape tensor {NORM}: \(63,\) in .*expected \(64,\)")


def test_wrong_kind_of_dtype(folder_of):
    folder = folder_of("mxfp4_tiny")
    name = f"{EXPERT}_scale"
    folder.tensors[name] = folder.tensors[name].float()
    _refused(folder.write(), rf"dtype tensor {name}: F32 in .*expected U8")
    folder.tensors[name] = folder.tensors[name].to(torch.int8)
    _refused(folder.write(), rf"tensor {name} in .* dtype 'I8', allowed: BF16")


def test_layers_of_another_model_are_all_counted(folder_of):
    folder = folder_of("text_tiny")
    folder.set_config(num_experts=17)
    message = _refused(folder.write(), "differences")
    assert "experts.16.w1.weight" in message and " more" in message


def test_wrapper_names_in_a_flat_folder(folder_of):
    folder = folder_of("text_tiny")
    folder.tensors = {f"language_model.{name}": one for name, one in folder.tensors.items()}
    _refused(folder.write(), r"missing tensor model\.embed_tokens\.weight")


@pytest.mark.parametrize("kept", [4, 200, 100_000, -1])
def test_truncated_file(folder_of, kept):
    path = folder_of("text_tiny").write()
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:kept])
    match = "not a sound safetensors file" if 0 < kept < 1000 else r"tensor .* is truncated"
    _refused(path, rf"(?s){match}.*(again)")


def test_bytes_behind_the_last_tensor(folder_of):
    path = folder_of("text_tiny").write()
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0\0")
    _refused(path, "2 bytes follow its last tensor")


def _rewrite_header(path, change):
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def test_inconsistent_headers(folder_of):
    path = folder_of("text_tiny").write()
    _rewrite_header(path, lambda header: header[NORM].update(shape=[63]))
    _refused(path, rf"tensor {NORM} in .* has 128 bytes, its shape \(63,\)")
    _rewrite_header(path, lambda header: header[NORM].update(shape=[64], data_offsets=[0, 128]))
    _refused(path, "overlaps another or leaves a gap")
    _rewrite_header(path, lambda header: header[NORM].pop("dtype"))
    _refused(path, "its header cannot be read")


def test_a_log_tail_must_be_zero(folder_of):
    folder = folder_of("mxfp4_tiny")
    folder.tensors[A_LOG][31] = 0.5
    _refused(folder.write(), rf"{A_LOG} .* 32 values for 4 heads .*tail that is not zero")


def test_a_log_lengths_must_agree_and_cover_the_heads(folder_of):
    folder = folder_of("mxfp4_tiny")
    folder.tensors[A_LOG] = folder.tensors[A_LOG][:4].clone()
    _refused(folder.write(), r"shape tensor .*A_log")
    for name in [one for one in folder.tensors if one.endswith("A_log")]:
        folder.tensors[name] = folder.tensors[name][:3].clone()
    _refused(folder.write(), r"A_log .* has 3 values, allowed: at least the 4 heads")


def test_metadata_that_contradicts_a_log(folder_of):
    path = folder_of("mxfp4_tiny").write({"format": "pt", "a_log_length": "128"})
    _refused(path, "a_log_length = 128, A_log has 32 values")


@pytest.mark.parametrize("experts", ["packed", "dequantized"])
def test_nan_scale(folder_of, experts):
    folder = folder_of("mxfp4_tiny")
    folder.tensors[f"{EXPERT}_scale"][0, 0] = 255
    _refused(folder.write(), rf"{EXPERT}_scale in .*255 is NaN", experts=experts)


def test_packed_weight_without_scale(folder_of):
    folder = folder_of("mxfp4_tiny")
    del folder.tensors[f"{EXPERT}_scale"]
    _refused(folder.write(), f"missing tensor {EXPERT}_scale", experts="dequantized")


def test_packing_is_seen_from_the_names(folder_of):
    folder = folder_of("mxfp4_tiny")
    folder.set_config(quantization_config=None)
    model = Model.from_pretrained(folder.write())
    assert all(bank.is_packed for bank in model.expert_banks())
    assert model.config.is_quantized


def test_arguments_and_sources(tmp_path, golden):
    source = golden("text_tiny")
    _refused(source, r"experts = 'int8'.*'packed', 'dequantized'", experts="int8")
    _refused(source, "dtype = 'int8'.*auto, float32", dtype="int8")
    _refused(source, r"dtype = torch\.int8", dtype=torch.int8)
    _refused(source, "device 'warp' is not usable", device="warp")
    _refused("no-such-model", "'no-such-model' is not a folder and not a bundled model")
    _refused(tmp_path, r"a folder without config\.json")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    _refused(tmp_path, r"pytorch_model\.bin'\] are pickles, which are never read")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    _refused(tmp_path, r"is not an index \(KeyError")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        Model.from_pretrained(tmp_path)
