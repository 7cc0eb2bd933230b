"""Images to patches, value for value as the released processor (architecture 6).

Legend: P patches, H and W rows and columns of a patch, C channels; [Y, X, C] whole images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from k3_core.image.settings import RELEASED, Background, ImageError, ImageSettings

# Modes whose channels have 8 bits or 1; wider ones would be clipped without a word.
ALPHA_MODES = ("RGBA", "LA", "PA")
OPAQUE_MODES = ("RGB", "L", "1", "P", "RGBX", "CMYK", "YCbCr", "HSV")


@dataclass(frozen=True)
class ResizePlan:
    """Size after scaling, padding on the right and bottom (pixels), grid (patches), positions."""

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int
    grid_h: int
    grid_w: int
    num_tokens: int


def plan_resize(width: int, height: int, settings: ImageSettings = RELEASED) -> ResizePlan:
    """How an image of `width` x `height` pixels enters the tower; it never grows.

    Padding comes after the scaling, so `num_tokens` may exceed in_patch_limit / 4 a little.
    """
    if width < 1 or height < 1:
        raise ImageError(f"image size {width}x{height}; both sides must have at least 1 pixel")
    patch, max_side = settings.patch_size, settings.patch_limit_on_one_side * settings.patch_size
    num_patches = max(1, width // patch) * max(1, height // patch)
    scale = min(
        1.0,
        math.sqrt(settings.in_patch_limit / num_patches),
        max_side / width,
        max_side / height,
    )
    new_width = min(max(1, int(width * scale)), max_side)
    new_height = min(max(1, int(height * scale)), max_side)
    pad_width, pad_height = -new_width % settings.cell, -new_height % settings.cell
    columns = (new_width + pad_width) // settings.cell
    rows = (new_height + pad_height) // settings.cell
    return ResizePlan(
        new_width=new_width,
        new_height=new_height,
        pad_width=pad_width,
        pad_height=pad_height,
        grid_h=rows * settings.merge_kernel_size,
        grid_w=columns * settings.merge_kernel_size,
        num_tokens=rows * columns,
    )


def image_prompt(width: int, height: int) -> str:
    """The text that stands for an image; sizes in pixels before any scaling."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def preprocess_image(
    image: Image.Image, settings: ImageSettings = RELEASED
) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches [P, 3, H, W] float32 of one image and its grid (1, rows, columns).

    Raises `ImageError` for a mode with more than 8 bits a channel.
    """
    plan = plan_resize(image.width, image.height, settings)
    patches = to_patches(scaled_rgb(image, plan, settings), plan, settings)
    return patches, (1, plan.grid_h, plan.grid_w)


def preprocess_images(
    images: Sequence[Image.Image], settings: ImageSettings = RELEASED
) -> tuple[Tensor, Tensor]:
    """`pixel_values` [P, 3, H, W] float32 and `grid_thws` [N, 3] int64 of several images."""
    if not images:
        raise ImageError("no images; leave pixel_values out when there are none")
    items = [preprocess_image(image, settings) for image in images]
    return torch.cat([patches for patches, _ in items]), torch.tensor([grid for _, grid in items])


def scaled_rgb(image: Image.Image, plan: ResizePlan, settings: ImageSettings) -> NDArray[np.uint8]:
    """The image at the planned size as [Y, X, 3], transparency laid over the background."""
    if image.mode not in ALPHA_MODES + OPAQUE_MODES:
        raise ImageError(
            f"image mode {image.mode!r}; allowed are {', '.join(ALPHA_MODES + OPAQUE_MODES)}: "
            "scale its values to 8 bits a channel first"
        )
    background = settings.transparent_bg_config
    if image.mode not in ALPHA_MODES or background is None:
        return np.asarray(_scale(image.convert("RGB"), plan))
    image = image.convert("RGBA")
    if settings.transparent_bg_fill_stage == "before_resize":
        return np.asarray(_scale(Image.fromarray(_composite(image, background)), plan))
    return _composite(_scale(image, plan), background)


def _scale(image: Image.Image, plan: ResizePlan) -> Image.Image:
    return image.resize((plan.new_width, plan.new_height), Image.Resampling.BICUBIC)


def _composite(image: Image.Image, background: Background) -> NDArray[np.uint8]:
    rgba = np.asarray(image).astype(np.float32)
    alpha = rgba[..., 3:] / np.float32(255)
    below = _background(background, image.height, image.width)[..., None]
    # Truncated, not rounded, and in float32: both decide the last bit.
    return (alpha * rgba[..., :3] + (1 - alpha) * below).astype(np.uint8)


def _background(background: Background, height: int, width: int) -> NDArray[np.float32]:
    if background.pattern == "white":
        return np.full((height, width), 255, np.float32)
    square = background.chessboard_square_size
    row = np.arange(height)[:, None] // square
    column = np.arange(width)[None, :] // square
    is_gray = (row + column) % 2 == 1
    levels = background.chessboard_gray_value, background.chessboard_white_value
    return np.where(is_gray, *levels).astype(np.float32)


def to_patches(rgb: NDArray[np.uint8], plan: ResizePlan, settings: ImageSettings) -> Tensor:
    """Pads [Y, X, 3] with zeros, cuts it, and normalises: [P, 3, H, W] float32."""
    return normalized(torch.from_numpy(cut_patches(rgb, plan, settings)), settings)


def cut_patches(
    rgb: NDArray[np.uint8], plan: ResizePlan, settings: ImageSettings
) -> NDArray[np.uint8]:
    """Pads [Y, X, 3] with zeros and cuts it row by row into [P, 3, H, W]: what is worth storing."""
    padded = np.pad(rgb, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))
    patch = settings.patch_size
    cut = padded.reshape(plan.grid_h, patch, plan.grid_w, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(-1, 3, patch, patch)


def normalized(patches_P3HW: Tensor, settings: ImageSettings = RELEASED) -> Tensor:
    """What the tower reads, float32 [P, 3, H, W], of patches in 0..255, on their device."""
    mean_311, std_311 = (
        torch.tensor(values, dtype=torch.float32, device=patches_P3HW.device)[:, None, None]
        for values in (settings.image_mean, settings.image_std)
    )
    return (patches_P3HW.to(torch.float32) / 255 - mean_311) / std_311
