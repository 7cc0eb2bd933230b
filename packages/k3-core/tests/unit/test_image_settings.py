"""Settings and modes that the image processor refuses, and modes it accepts."""

import numpy as np
import pytest
import torch
from PIL import Image

from k3_core.image import (
    ImageError,
    ImageSettings,
    plan_resize,
    preprocess_image,
    preprocess_images,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_sise": 14}, "unknown image setting 'patch_sise'"),
        ({"fixed_output_tokens": 64}, "only null"),
        ({"patch_limit_on_one_side": 7}, "multiple of merge_kernel_size 2"),
        ({"in_patch_limit": 0}, "in_patch_limit = 0"),
        ({"image_std": [0.5, 0.0, 0.5]}, "no deviation zero"),
        ({"transparent_bg_fill_stage": "never"}, "allowed are after_resize, before_resize"),
        ({"transparent_bg_config": {"pattern": "black"}}, "allowed are chessboard, white"),
        ({"transparent_bg_config": {"chessboard_square_on_top_left": False}}, "top_left"),
        ({"transparent_bg_config": {"chessboard_square_size": 0}}, "at least 1"),
        ({"transparent_bg_config": {"colour": 1}}, "unknown image setting 'colour'"),
    ],
)
def test_wrong_settings_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        ImageSettings.from_dict(values)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_empty_images_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at least 1 pixel"):
        plan_resize(*size)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_wide_channels_are_refused(mode: str) -> None:
    with pytest.raises(ImageError, match="8 bits a channel"):
        preprocess_image(Image.new(mode, (28, 28)))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "HSV"])
def test_white_is_one_in_every_mode(mode: str) -> None:
    values, grid = preprocess_image(Image.new("RGB", (28, 28), "white").convert(mode))
    assert grid == (1, 2, 2)
    assert (values == 1).all()


def test_palette_images_are_scaled_as_colours_not_as_indices() -> None:
    noise = Image.effect_noise((60, 60), 80).convert("P")
    settings = ImageSettings(in_patch_limit=4)
    values, _ = preprocess_image(noise, settings)
    expected, _ = preprocess_image(noise.convert("RGB"), settings)
    torch.testing.assert_close(values, expected, atol=0, rtol=0)


def test_patches_run_row_by_row_with_channels_first() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3), dtype=np.uint8)
    values, grid = preprocess_image(Image.fromarray(pixels))
    assert grid == (1, 2, 4)
    for row, column, channel in np.ndindex(2, 4, 3):
        block = pixels[14 * row : 14 * row + 14, 14 * column : 14 * column + 14, channel]
        expected = torch.from_numpy(block / 127.5 - 1).float()
        torch.testing.assert_close(values[row * 4 + column, channel], expected)


def test_several_images_are_packed_in_order() -> None:
    images = [Image.new("RGB", (28, 28), "white"), Image.new("RGB", (28, 56), "black")]
    values, grids = preprocess_images(images)
    assert grids.tolist() == [[1, 2, 2], [1, 4, 2]]
    assert values[:4].unique().tolist() == [1] and values[4:].unique().tolist() == [-1]
    with pytest.raises(ImageError, match="no images"):
        preprocess_images([])
