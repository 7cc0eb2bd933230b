"""Video chunks: sampling, grids, prompts, and the budget of a chunk."""

import pytest
import torch
from PIL import Image

from k3_core.image import (
    ImageError,
    ImageSettings,
    VideoSettings,
    plan_resize,
    preprocess_video,
    sample_frames,
    video_prompt,
)
from k3_core.image.video import timestamp


def gray(level: int, size: tuple[int, int] = (28, 28)) -> Image.Image:
    return Image.new("L", size, level)


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [
        (6, 2.0, [0, 1, 2, 3, 4, 5]),
        (8, 4.0, [0, 2, 4, 6]),
        (10, 5.0, [0, 2, 5, 7]),
        (3, 1.0, [0, 1, 2]),  # slower than the sampling: nothing is shown twice
        (1, 30.0, [0]),
        (31, 30.0, [0, 15, 30]),
    ],
)
def test_sampling_at_two_frames_a_second(num_frames: int, fps: float, expected: list) -> None:
    assert sample_frames(num_frames, fps) == expected


def test_chunks_of_four_frames_with_the_time_of_the_first() -> None:
    levels = [0, 51, 102, 153, 204, 255]
    video = preprocess_video([gray(level) for level in levels], fps=2.0)
    assert video.grid_thws.tolist() == [[4, 2, 2], [2, 2, 2]]
    found = video.pixel_values.reshape(6, -1)
    expected = torch.tensor(levels)[:, None] / 127.5 - 1
    torch.testing.assert_close(found, expected.expand_as(found))
    assert video.prompts == (
        "00:00:00.000<|media_begin|>video 28x28<|media_content|><|media_pad|><|media_end|>",
        "00:00:02.000<|media_begin|>video 28x28<|media_content|><|media_pad|><|media_end|>",
    )


def test_times_are_those_of_the_frames_taken() -> None:
    video = preprocess_video([gray(0)] * 13, fps=3.0)  # takes 0, 1, 3, 4, 6, 7, 9, 10, 12
    assert [prompt[:12] for prompt in video.prompts] == [
        "00:00:00.000",
        "00:00:02.000",
        "00:00:04.000",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00:00.000"), (59.9996, "00:01:00.000"), (3723.25, "01:02:03.250")],
)
def test_timestamp(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text
    assert video_prompt(5, 6, seconds).startswith(text + "<|media_begin|>video 5x6<|")


def test_a_chunk_has_the_budget_of_an_image() -> None:
    image = ImageSettings(in_patch_limit=64)
    video = preprocess_video([gray(9, (300, 300))] * 4, 2.0, VideoSettings(image=image))
    [grid] = video.grid_thws.tolist()
    plan = plan_resize(300, 300, ImageSettings(in_patch_limit=16))
    assert grid == [4, plan.grid_h, plan.grid_w]
    assert video.pixel_values.shape == (4 * plan.grid_h * plan.grid_w, 3, 14, 14)


def test_what_is_refused() -> None:
    with pytest.raises(ImageError, match="0 frames"):
        preprocess_video([], fps=2.0)
    for fps in (0.0, float("nan"), float("inf")):
        with pytest.raises(ImageError, match="rates must be finite and above 0"):
            preprocess_video([gray(0)], fps=fps)
    with pytest.raises(ImageError, match="all frames must have one size"):
        preprocess_video([gray(0), gray(0, (28, 56))], fps=2.0)
    with pytest.raises(ImageError, match="allowed are 1 to 4"):
        VideoSettings(frames_per_chunk=5)
    with pytest.raises(ImageError, match="sample_fps = 0"):
        VideoSettings(sample_fps=0)
    with pytest.raises(ImageError, match="sample_fps = inf"):
        VideoSettings(sample_fps=float("inf"))
