"""Image and video parts of a chat: data URLs, and https addresses of hosts that the server was told
to fetch from; limits before decoding (serving 8, architecture 6). A video is an animated GIF or
WebP: nothing here decodes other containers."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from k3_core.engine import Images
from k3_core.xtml.content import IMAGE_PARTS
from k3_serve.api.errors import bad_request
from k3_serve.limits import Limits
from k3_serve.observer import Observer
from k3_serve.ops.fetch import FetchError, fetch_all
from k3_serve.settings import Settings

VIDEO_FORMS = "; a video is an animated GIF or WebP, or its frames as image_url parts"
DATA_URL = re.compile(r"data:(image|video)/[a-z0-9.+-]+;base64,", re.IGNORECASE)


async def fetch_images(
    messages: list[dict[str, Any]], settings: Settings, observer: Observer
) -> dict[str, bytes]:
    """The files at the https addresses of image parts; ApiError 400 for one that is not fetched.

    Without a list of hosts there is nothing to fetch from, and `read_images` refuses an address.
    """
    if not settings.media.hosts:
        return {}
    urls = list(_image_urls(messages))
    _check_number(len(urls), settings.limits, observer)
    try:
        return await fetch_all(
            (url for _, url, _ in urls if url.startswith("https:")), settings.media
        )
    except FetchError as error:
        observer.count("k3_media_rejected_total", 1, {"reason": "fetch"})
        raise bad_request(f"an image cannot be fetched: {error}", "messages") from error


def read_images(
    messages: list[dict[str, Any]],
    limits: Limits,
    files: Mapping[str, bytes],
    observer: Observer,
) -> tuple[Images | None, list[str] | None]:
    """The pixels of all image and video parts in order, and the prompt text of each; or None.

    `files` has what was fetched, by address. Raises ApiError 400 for another kind of URL, for too
    many or too large images and for data that is no image. What the images decode to is bounded
    one by one and together by their headers, before each is decoded.
    """
    urls = list(_image_urls(messages))
    if not urls:
        return None, None
    _check_number(len(urls), limits, observer)
    import torch

    from k3_core.image import ImageError

    items: list[_Item] = []
    num_left = limits.max_request_pixels
    for where, url, is_video in urls:
        content = files[url] if url in files else _decode(where, url, observer)
        read = _read_video if is_video else _read_image
        try:
            items.append(read(content, min(limits.max_image_pixels, num_left)))
        except ImageError as error:
            observer.count("k3_media_rejected_total", 1, {"reason": "image"})
            forms = VIDEO_FORMS if is_video else ""
            raise bad_request(f"{where}: {error}{forms}", where) from error
        num_left -= items[-1].num_pixels
    pixels, grids = (torch.cat(parts) for parts in zip(*(i.images for i in items), strict=True))
    return Images(pixels, grids), [item.prompt for item in items]


class _Item(NamedTuple):
    """One part as the model gets it; a video is one image for every chunk of its frames."""

    images: Images
    prompt: str
    num_pixels: int


def _read_image(content: bytes, max_pixels: int) -> _Item:
    from k3_core.image import image_prompt, open_image, preprocess_images

    picture = open_image(content, max_pixels=max_pixels)
    width, height = picture.size
    images = Images(*preprocess_images([picture]))
    return _Item(images, image_prompt(width, height), width * height)


def _read_video(content: bytes, max_pixels: int) -> _Item:
    from k3_core.image import VideoSettings, open_animation, preprocess_video

    fps = VideoSettings().sample_fps
    frames = open_animation(content, fps=fps, max_pixels=max_pixels)
    video = preprocess_video(frames, fps)
    images = Images(video.pixel_values, video.grid_thws)
    return _Item(images, "".join(video.prompts), sum(f.width * f.height for f in frames))


def _check_number(number: int, limits: Limits, observer: Observer) -> None:
    if number > limits.max_images:
        observer.count("k3_media_rejected_total", 1, {"reason": "count"})
        raise bad_request(f"{number} images; at most {limits.max_images}", "messages")


def _image_urls(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """The place and URL of every part, and whether it is a video."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS:
                continue
            where, kind = f"messages[{index}].content[{place}]", part["type"]
            url = part.get(kind)
            if isinstance(url, dict):
                url = url.get("url")
            if not isinstance(url, str):
                raise bad_request(f"{where} has no {kind} with a url", where)
            yield where, url, kind == "video_url"


def _decode(where: str, url: str, observer: Observer) -> bytes:
    match = DATA_URL.match(url)
    if match is None:
        observer.count("k3_media_rejected_total", 1, {"reason": "url"})
        raise bad_request(
            f"{where}: only data URLs (data:image/png;base64,...) are accepted, "
            f"this one begins with {url[:16]!r}",
            where,
        )
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except binascii.Error as error:
        observer.count("k3_media_rejected_total", 1, {"reason": "data"})
        raise bad_request(f"{where}: the data URL is not valid base64", where) from error
