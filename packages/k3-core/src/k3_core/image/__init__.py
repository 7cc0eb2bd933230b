"""Images and video to patches for the vision tower (architecture 6)."""

from k3_core.image.open import open_animation, open_image
from k3_core.image.preprocess import (
    ResizePlan,
    image_prompt,
    plan_resize,
    preprocess_image,
    preprocess_images,
)
from k3_core.image.settings import Background, ImageError, ImageSettings
from k3_core.image.video import (
    VideoInputs,
    VideoSettings,
    preprocess_video,
    sample_frames,
    video_prompt,
)

__all__ = [
    "Background",
    "ImageError",
    "ImageSettings",
    "ResizePlan",
    "VideoInputs",
    "VideoSettings",
    "image_prompt",
    "open_animation",
    "open_image",
    "plan_resize",
    "preprocess_image",
    "preprocess_images",
    "preprocess_video",
    "sample_frames",
    "video_prompt",
]
