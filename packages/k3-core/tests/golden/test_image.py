"""The image processor against recorded plans, prompts and pixels of the released one."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from k3_core.image import ImageSettings, image_prompt, plan_resize, preprocess_image

PIXEL_CASES = (
    "rgb_pad_only", "rgb_exact", "rgb_downscaled_bicubic", "gray",
    "rgba_chessboard_after_resize", "rgba_chessboard_downscaled", "rgba_white_before_resize",
    "rgba_no_bg_config",
)  # fmt: skip
# The data was made with Pillow 13; other versions scale down with other roundings.
SCALING_TOLERANCE = 0.0 if PIL.__version__.startswith("13.") else 2 / 255


@pytest.fixture(scope="module")
def cases(golden: Callable[[str], Path]) -> dict:
    return json.loads((golden("image_preprocess") / "cases.json").read_text())


@pytest.fixture(scope="module")
def pixels(golden: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    return load_file(golden("image_preprocess") / "pixels.safetensors")


def test_defaults_are_the_released_settings(cases: dict) -> None:
    assert ImageSettings.from_dict(cases["released_media_proc_cfg"]) == ImageSettings()


def test_plans_and_prompts_at_the_released_limits(cases: dict) -> None:
    assert len(cases["resize_plans"]) == 24
    for case in cases["resize_plans"]:
        size = case["width"], case["height"]
        plan = asdict(plan_resize(*size))
        assert plan == {name: case[name] for name in plan}, size
        assert image_prompt(*size) == case["prompt"]


def test_plans_at_small_limits(cases: dict) -> None:
    assert len(cases["small_limit_plans"]) == 12
    for case in cases["small_limit_plans"]:
        limits = ("in_patch_limit", "patch_limit_on_one_side")
        settings = ImageSettings(**{name: case[name] for name in limits})
        plan = asdict(plan_resize(case["width"], case["height"], settings))
        assert {name: plan[name] for name in plan.keys() & case.keys()} == {
            name: case[name] for name in case if name not in ("width", "height", *limits)
        }


@pytest.mark.parametrize("name", PIXEL_CASES)
def test_pixels(name: str, cases: dict, pixels: dict[str, torch.Tensor]) -> None:
    case = next(case for case in cases["pixel_cases"] if case["name"] == name)
    settings = ImageSettings.from_dict(case["media_proc_cfg"])
    image = Image.fromarray(pixels[f"{name}.input"].numpy())
    assert image.mode == case["mode"]
    values, grid = preprocess_image(image, settings)
    plan = plan_resize(image.width, image.height, settings)
    is_scaled = (plan.new_width, plan.new_height) != image.size
    tolerance = SCALING_TOLERANCE if is_scaled else 0.0
    torch.testing.assert_close(values, pixels[f"{name}.pixel_values"], atol=tolerance, rtol=0)
    assert [list(grid)] == pixels[f"{name}.grid_thws"].tolist()
    assert plan.num_tokens == case["num_tokens"]


def test_every_recorded_pixel_case_is_tested(cases: dict) -> None:
    assert {case["name"] for case in cases["pixel_cases"]} == set(PIXEL_CASES)
