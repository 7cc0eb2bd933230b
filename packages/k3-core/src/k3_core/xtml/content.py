"""Message content as segments: a string, a list of text and image parts, or nothing."""

from collections.abc import Iterator
from typing import Any

from k3_core.xtml.json_text import ConversationError
from k3_core.xtml.segments import Segment, plain

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
IMAGE_PARTS = ("image", "image_url", "video_url")  # a video is several images to the model


class ImagePrompts:
    """Hands out the prebuilt image prompts in order; without any, the placeholder stays.

    A prompt is control text (`<|media_begin|>image WxH<|media_content|><|media_pad|>
    <|media_end|>`, of a video one such for each chunk), so it must come from the image processor,
    never from a caller.
    """

    def __init__(self, prompts: list[str] | None) -> None:
        self.prompts = prompts
        self.num_images = 0

    def take(self) -> list[Segment]:
        """The segment of the next image. Raises nothing: `check` compares the counts."""
        index = self.num_images
        self.num_images += 1
        if self.prompts is None:
            return [Segment(IMAGE_PLACEHOLDER, True)]
        return [Segment(self.prompts[index], True)] if index < len(self.prompts) else []

    def check(self) -> None:
        """Raise ConversationError unless every prompt met exactly one image."""
        if self.prompts is not None and self.num_images != len(self.prompts):
            raise ConversationError(
                f"{len(self.prompts)} image prompts for {self.num_images} images; "
                f"pass one prompt per image, in the order of the messages"
            )


def content_segments(content: Any, images: ImagePrompts, where: str) -> list[Segment]:
    """Segments of a message's content; `where` names it in errors.

    In a plain string each image placeholder is an image, provided that image prompts are given;
    in a list only image parts are. Raises ConversationError for any other content.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return _from_string(content, images)
    if isinstance(content, list):
        return [s for part in content for s in _from_part(part, images, where)]
    raise ConversationError(
        f"{where}: content is a {type(content).__name__}, not a string, a list of parts or null"
    )


def _from_string(text: str, images: ImagePrompts) -> list[Segment]:
    if images.prompts is None:
        return plain(text)
    first, *rest = text.split(IMAGE_PLACEHOLDER)
    return plain(first) + [s for piece in rest for s in (*images.take(), *plain(piece))]


def _from_part(part: Any, images: ImagePrompts, where: str) -> Iterator[Segment]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in IMAGE_PARTS:
        yield from images.take()
    elif kind == "text" and isinstance(part.get("text"), str):
        yield from plain(part["text"])
    else:
        raise ConversationError(
            f"{where}: content part {str(part)[:200]} is neither a text part with a string "
            f"`text` nor one of the types {', '.join(IMAGE_PARTS)}"
        )
