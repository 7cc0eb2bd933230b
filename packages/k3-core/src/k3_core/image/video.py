"""Video as chunks of frames: our own choice.

K3's tower takes up to four frames an item and was trained on video (report 7.3), but nothing
says how the released model cuts it (architecture 6). Ours follows the predecessor's habit: two
frames a second, four consecutive sampled frames an item, the time of its first frame as text
before it. The patch budget of an image holds for a whole chunk, so each frame gets a quarter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from k3_core.image.preprocess import plan_resize, scaled_rgb, to_patches
from k3_core.image.settings import RELEASED, ImageError, ImageSettings


@dataclass(frozen=True)
class VideoSettings:
    """Frames a second, frames an item (the tower allows 4), and settings of a single frame."""

    sample_fps: float = 2.0
    frames_per_chunk: int = 4
    image: ImageSettings = RELEASED

    def __post_init__(self) -> None:
        if not 0 < self.sample_fps < math.inf:
            raise ImageError(f"sample_fps = {self.sample_fps}; it must be finite and above 0")
        if not 1 <= self.frames_per_chunk <= 4:
            raise ImageError(f"frames_per_chunk = {self.frames_per_chunk}; allowed are 1 to 4")

    @property
    def frame(self) -> ImageSettings:
        """Image settings of one frame: an equal share of an item's patch budget."""
        limit = max(1, self.image.in_patch_limit // self.frames_per_chunk)
        return replace(self.image, in_patch_limit=limit)


DEFAULT = VideoSettings()


class VideoInputs(NamedTuple):
    """Patches [P, 3, H, W] of all chunks, grids [N, 3] int64, and one prompt a chunk."""

    pixel_values: Tensor
    grid_thws: Tensor
    prompts: tuple[str, ...]


def sample_frames(num_frames: int, fps: float, sample_fps: float = 2.0) -> list[int]:
    """Indices of the frames on screen at times 0, 1/sample_fps, ...; each frame at most once."""
    if num_frames < 1 or not (0 < fps < math.inf and 0 < sample_fps < math.inf):
        raise ImageError(
            f"{num_frames} frames at {fps} fps sampled at {sample_fps} fps; "
            "there must be a frame and both rates must be finite and above 0"
        )
    step = max(1.0, fps / sample_fps)
    return [math.floor(i * step) for i in range(math.ceil(num_frames / step))]


def timestamp(seconds: float) -> str:
    """hh:mm:ss.mmm, rounded to a millisecond."""
    total_ms = round(seconds * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{ms // 1000:02d}.{ms % 1000:03d}"


def video_prompt(width: int, height: int, seconds: float) -> str:
    """The text of one chunk that starts at `seconds`; frame size in pixels before scaling."""
    return (
        f"{timestamp(seconds)}<|media_begin|>video {width}x{height}"
        "<|media_content|><|media_pad|><|media_end|>"
    )


def preprocess_video(
    frames: Sequence[Image.Image], fps: float, settings: VideoSettings = DEFAULT
) -> VideoInputs:
    """One item for every chunk of sampled frames; the last chunk may be shorter.

    `frames` are all frames of the video at `fps` frames a second (those of `open_animation` at
    the rate they were taken). Raises `ImageError` when there are none or sizes differ.
    """
    indices = sample_frames(len(frames), fps, settings.sample_fps)
    sizes = sorted({frames[index].size for index in indices})
    if len(sizes) > 1:
        raise ImageError(f"frames of sizes {sizes}; all frames must have one size")
    (width, height), frame = sizes[0], settings.frame
    plan = plan_resize(width, height, frame)
    size = settings.frames_per_chunk
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    return VideoInputs(
        pixel_values=torch.cat(
            [to_patches(scaled_rgb(frames[i], plan, frame), plan, frame) for i in indices]
        ),
        grid_thws=torch.tensor([(len(chunk), plan.grid_h, plan.grid_w) for chunk in chunks]),
        prompts=tuple(video_prompt(width, height, chunk[0] / fps) for chunk in chunks),
    )
