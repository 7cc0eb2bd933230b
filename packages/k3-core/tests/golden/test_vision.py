"""The vision tower, the projector and the merging against recorded released outputs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3_core.config import K3Config
from k3_core.vision import Projector, VisionTower, encode_images, merge_batch

FOLDERS = ("mm_tiny", "mxfp4_tiny")


def load(folder: Path, dtype: torch.dtype) -> tuple[VisionTower, Projector, dict]:
    config = K3Config.from_file(folder / "config.json").vision
    tensors = load_file(folder / "model.safetensors")
    tower, projector = VisionTower(config, dtype=dtype), Projector(config, dtype=dtype)
    for module, prefix in ((tower, "vision_tower."), (projector, "mm_projector.")):
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        module.load_state_dict(own)
    return tower, projector, tensors


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_intermediate(folder: str, dtype: torch.dtype, golden: Callable[[str], Path]) -> None:
    tower, projector, _ = load(golden(folder), dtype)
    expected = load_file(golden(folder) / "vision.safetensors")
    pixel_values, grids = expected.pop("pixel_values"), expected.pop("grid_thws")
    collect: dict[str, torch.Tensor] = {}
    features = encode_images(tower, projector, pixel_values, grids, collect)
    assert collect.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(collect[name], value.to(dtype), atol=1e-4, rtol=0, msg=name)
    assert [len(item) for item in features] == [6, 16, 6]
    torch.testing.assert_close(torch.cat(features), collect["projected"], atol=0, rtol=0)


@pytest.mark.parametrize("folder", FOLDERS)
def test_features_take_the_place_of_placeholders(
    folder: str, golden: Callable[[str], Path]
) -> None:
    tower, projector, tensors = load(golden(folder), torch.float32)
    expected = load_file(golden(folder) / "multimodal_forward.safetensors")
    images = load_file(golden(folder) / "vision.safetensors")
    features = encode_images(tower, projector, images["pixel_values"], images["grid_thws"])
    cases = json.loads((golden(folder) / "cases.json").read_text())
    ids = torch.tensor([cases["multimodal_input_ids"]])
    embeds = tensors["language_model.model.embed_tokens.weight"].float()[ids]
    merged = merge_batch(ids, embeds, features, placeholder_id=250)
    torch.testing.assert_close(merged.embeds_BXD, expected["inputs_embeds"], atol=1e-4, rtol=0)
    assert torch.equal(merged.attention_mask_BX.int(), expected["attention_mask"])


def test_names_and_shapes_are_the_released_ones(golden: Callable[[str], Path]) -> None:
    folder = golden("released_checkpoint")
    config = K3Config.from_file(folder / "config_values.json").vision
    listed = json.loads((folder / "tensors.json").read_text())["tensors"]
    expected = {
        row["name"].replace("{block}", str(block)): row["shape"]
        for row in listed
        if row["name"].startswith(("vision_tower.", "mm_projector."))
        for block in range(row["count"])
    }
    found = {}
    for module, prefix in ((VisionTower, "vision_tower."), (Projector, "mm_projector.")):
        state = module(config, device="meta").state_dict()
        found |= {prefix + name: list(value.shape) for name, value in state.items()}
    assert found == expected
