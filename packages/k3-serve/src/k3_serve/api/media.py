"""Image parts of a chat: data URLs only, limits before decoding (serving 8, architecture 6)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from k3_core.engine import Images
from k3_serve.api.errors import bad_request
from k3_serve.limits import Limits

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def read_images(
    messages: list[dict[str, Any]], limits: Limits
) -> tuple[Images | None, list[str] | None]:
    """The pixels of all image parts in order, and the prompt text of each; None without any.

    Raises ApiError 400 for another kind of URL, for too many or too large images and for data
    that is no image.
    """
    urls = list(_image_urls(messages))
    if not urls:
        return None, None
    if len(urls) > limits.max_images:
        raise bad_request(f"{len(urls)} images; at most {limits.max_images}", "messages")
    from k3_core.image import ImageError, image_prompt, open_image, preprocess_images

    pictures = []
    for where, url in urls:
        try:
            pictures.append(open_image(_decode(where, url), max_pixels=limits.max_image_pixels))
        except ImageError as error:
            raise bad_request(f"{where}: {error}", where) from error
    try:
        images = Images(*preprocess_images(pictures))
    except ImageError as error:
        raise bad_request(str(error), "messages") from error
    return images, [image_prompt(picture.width, picture.height) for picture in pictures]


def _image_urls(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") not in ("image_url", "image"):
                continue
            where = f"messages[{index}].content[{place}]"
            url = part.get(part["type"])
            if isinstance(url, dict):
                url = url.get("url")
            if not isinstance(url, str):
                raise bad_request(f"{where} has no image URL", where)
            yield where, url


def _decode(where: str, url: str) -> bytes:
    match = DATA_URL.match(url)
    if match is None:
        raise bad_request(
            f"{where}: only images in data URLs (data:image/png;base64,...) are accepted, "
            f"this one begins with {url[:16]!r}",
            where,
        )
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except binascii.Error as error:
        raise bad_request(f"{where}: the data URL is not valid base64", where) from error
