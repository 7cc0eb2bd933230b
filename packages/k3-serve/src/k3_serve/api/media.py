"""Image parts of a chat: data URLs, and https addresses of hosts that the server was told to fetch
from; limits before decoding (serving 8, architecture 6)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from k3_core.engine import Images
from k3_serve.api.errors import bad_request
from k3_serve.limits import Limits
from k3_serve.observer import Observer
from k3_serve.ops.fetch import FetchError, fetch_all
from k3_serve.settings import Settings

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


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
        return await fetch_all((url for _, url in urls if url.startswith("https:")), settings.media)
    except FetchError as error:
        observer.count("k3_media_rejected_total", 1, {"reason": "fetch"})
        raise bad_request(f"an image cannot be fetched: {error}", "messages") from error


def read_images(
    messages: list[dict[str, Any]],
    limits: Limits,
    files: Mapping[str, bytes],
    observer: Observer,
) -> tuple[Images | None, list[str] | None]:
    """The pixels of all image parts in order, and the prompt text of each; None without any.

    `files` has what was fetched, by address. Raises ApiError 400 for another kind of URL, for too
    many or too large images and for data that is no image. What the images decode to is bounded
    one by one and together by their headers, before each is decoded.
    """
    urls = list(_image_urls(messages))
    if not urls:
        return None, None
    _check_number(len(urls), limits, observer)
    from k3_core.image import ImageError, image_prompt, open_image, preprocess_images

    pictures = []
    num_left = limits.max_request_pixels
    for where, url in urls:
        content = files[url] if url in files else _decode(where, url, observer)
        try:
            picture = open_image(content, max_pixels=min(limits.max_image_pixels, num_left))
        except ImageError as error:
            observer.count("k3_media_rejected_total", 1, {"reason": "image"})
            raise bad_request(f"{where}: {error}", where) from error
        num_left -= picture.width * picture.height
        pictures.append(picture)
    try:
        images = Images(*preprocess_images(pictures))
    except ImageError as error:
        raise bad_request(str(error), "messages") from error
    return images, [image_prompt(picture.width, picture.height) for picture in pictures]


def _check_number(number: int, limits: Limits, observer: Observer) -> None:
    if number > limits.max_images:
        observer.count("k3_media_rejected_total", 1, {"reason": "count"})
        raise bad_request(f"{number} images; at most {limits.max_images}", "messages")


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


def _decode(where: str, url: str, observer: Observer) -> bytes:
    match = DATA_URL.match(url)
    if match is None:
        observer.count("k3_media_rejected_total", 1, {"reason": "url"})
        raise bad_request(
            f"{where}: only images in data URLs (data:image/png;base64,...) are accepted, "
            f"this one begins with {url[:16]!r}",
            where,
        )
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except binascii.Error as error:
        observer.count("k3_media_rejected_total", 1, {"reason": "data"})
        raise bad_request(f"{where}: the data URL is not valid base64", where) from error
