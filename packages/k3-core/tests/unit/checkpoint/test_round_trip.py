"""Loading and saving against the bytes that the safetensors library reads."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from k3_core import K3ForConditionalGeneration as Model
from k3_core.checkpoint.writer import Staging

NAMES = ["text_tiny", "mm_tiny", "mxfp4_tiny"]


def _files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_saved_tensors_and_config_equal_the_source(golden, tmp_path, name):
    Model.from_pretrained(golden(name)).save_pretrained(tmp_path)
    source = load_file(golden(name) / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == source.keys()
    for key, tensor in source.items():
        assert saved[key].dtype == tensor.dtype and torch.equal(saved[key], tensor), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads((golden(name) / "config.json").read_text())


@pytest.mark.parametrize("experts", ["packed", "dequantized"])
@pytest.mark.parametrize("name", NAMES)
def test_load_save_load_save_is_byte_identical(golden, tmp_path, name, experts):
    first, second = tmp_path / "first", tmp_path / "second"
    Model.from_pretrained(golden(name), experts=experts).save_pretrained(first)
    Model.from_pretrained(first, experts=experts).save_pretrained(second)
    assert _files(first) == _files(second)


def test_saving_over_the_source_changes_nothing(golden, tmp_path):
    Model.from_pretrained(golden("mm_tiny")).save_pretrained(tmp_path)
    before = _files(tmp_path)
    Model.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert _files(tmp_path) == before


def test_dtypes(golden):
    name, kept = "language_model.model.norm.weight", "language_model.model.layers.0.self_attn.A_log"
    for dtype, wanted in (
        (torch.float32, torch.float32),
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
    ):
        state = Model.from_pretrained(golden("mm_tiny"), dtype=dtype).state_dict()
        assert state[name].dtype == wanted and state[kept].dtype == torch.float32


def test_stored_dtype_that_differs_from_the_config_is_kept(folder_of, tmp_path):
    folder = folder_of("text_tiny")
    name = "model.layers.2.input_layernorm.weight"
    folder.tensors[name] = folder.tensors[name].float() + 2**-20
    Model.from_pretrained(folder.write()).save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved[name], folder.tensors[name])


def test_packed_experts_stay_packed_and_small(golden):
    model = Model.from_pretrained(golden("mxfp4_tiny"))
    source = load_file(golden("mxfp4_tiny") / "model.safetensors")
    state = model.state_dict()
    experts = [name for name in state if ".experts." in name]
    assert all(torch.equal(state[name], source[name]) for name in experts)
    stored = sum(t.nbytes for bank in model.expert_banks() for t in bank.buffers())
    weights = sum(2 * source[n].numel() for n in experts if n.endswith("_packed"))
    assert stored <= 0.6 * weights
    assert not [p for bank in model.expert_banks() for p in bank.parameters()]


def test_dequantized_experts_equal_the_packed_ones_and_save_as_weights(golden, tmp_path):
    packed = Model.from_pretrained(golden("mxfp4_tiny"))
    plain = Model.from_pretrained(golden("mxfp4_tiny"), experts="dequantized")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert (packed(ids).logits - plain(ids).logits).abs().max() <= 1e-5
    plain.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"] or (
        config["text_config"]["quantization_config"] is None
    )
    again = Model.from_pretrained(tmp_path / "plain").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.state_dict().items())


def test_packing_again_gives_the_same_weights(golden, tmp_path):
    plain = Model.from_pretrained(golden("mxfp4_tiny"), experts="dequantized")
    weights = {k: v.clone() for k, v in plain.state_dict().items() if ".experts." in k}
    plain.pack_experts()
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    again = Model.from_pretrained(tmp_path, experts="dequantized").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_the_stored_length_of_a_log_is_written_back(golden, tmp_path):
    model = Model.from_pretrained(golden("mxfp4_tiny"))
    name = "language_model.model.layers.0.self_attn.A_log"
    assert model.state_dict()[name].shape == (4,)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a_log_length": "32"}
        stored = file.get_tensor(name)
    assert stored.shape == (32,) and stored[4:].count_nonzero() == 0


def test_tokenizer_files_of_the_source_are_carried_on(folder_of, tmp_path):
    folder = folder_of("text_tiny")
    contents = {
        "tiktoken.model": b"AA== 0\n",
        "tokenizer_config.json": b"{}",
        "tokenizer.json": b"[]",
    }
    for name, data in contents.items():
        (folder.path / name).write_bytes(data)
    (folder.path / "generation_config.json").write_bytes(b'{"eos_token_id": 7}')
    Model.from_pretrained(folder.write()).save_pretrained(tmp_path / "out")
    saved = _files(tmp_path / "out")
    assert {name: saved[name] for name in contents} == contents
    assert saved["generation_config.json"] == b'{"eos_token_id": 7}'


def test_a_given_tokenizer_writes_its_own_files(golden, tmp_path):
    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "tiktoken.model").write_text("own")

    Model.from_pretrained(golden("text_tiny")).save_pretrained(tmp_path, tokenizer=Tokenizer())
    assert (tmp_path / "tiktoken.model").read_text() == "own"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 242 and generation["temperature"] == 1.0


def test_an_interrupted_save_leaves_the_old_files(tmp_path):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(RuntimeError), Staging(tmp_path) as staging:
        staging.write_json("a.json", {})
        raise RuntimeError
    assert _files(tmp_path) == {"a.json": b"old"}
