"""Untrusted bytes to images: format, size and pixel limits hold before anything is decoded."""

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from k3_core.image.settings import ImageError

# An allow-list, since some of Pillow's readers start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 89_478_485  # where Pillow itself begins to warn
MAX_ANIMATION_PIXELS = 2**28
# What Pillow's readers raise for damaged data.
DAMAGED = (OSError, SyntaxError, EOFError, ValueError, IndexError, struct.error)


def open_image(
    data: bytes, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES
) -> Image.Image:
    """The decoded image in `data`, the first frame of an animation.

    Raises `ImageError` for too many bytes or pixels (checked on the header, before decoding),
    an unknown format and damaged data.
    """
    with _opened(data, max_pixels, max_bytes) as image:
        image.load()
        return image


def open_animation(
    data: bytes,
    *,
    fps: float = 2.0,
    max_pixels: int = MAX_ANIMATION_PIXELS,
    max_bytes: int = MAX_BYTES,
) -> list[Image.Image]:
    """Frames of an animated GIF or WebP as shown at times 0, 1/fps, 2/fps, ... seconds.

    A frame without a duration lasts 0.1 s, as browsers show it. `max_pixels` bounds all frames
    of the file together, and all returned ones. Raises as `open_image`.
    """
    if not 0 < fps < math.inf:
        raise ImageError(f"fps = {fps}; it must be finite and above 0")
    with _opened(data, max_pixels, max_bytes) as image:
        num_frames = getattr(image, "n_frames", 1)
        _check_pixels(image, num_frames, max_pixels)
        frames: list[Image.Image] = []
        end_ms = 0.0
        for index in range(num_frames):
            image.seek(index)
            image.load()
            shown = image.copy()
            end_ms += image.info.get("duration") or 100
            _check_pixels(image, math.ceil(end_ms * fps / 1000), max_pixels)
            while len(frames) * 1000 / fps < end_ms:
                frames.append(shown)
        return frames


@contextmanager
def _opened(data: bytes, max_pixels: int, max_bytes: int) -> Iterator[Image.Image]:
    if len(data) > max_bytes:
        raise ImageError(f"{len(data)} bytes of image data; at most {max_bytes} are allowed")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_pixels(image, 1, max_pixels)
        yield image
    except Image.DecompressionBombError as error:
        raise ImageError(f"{error}; send a smaller image") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(
            f"image data of {len(data)} bytes in no allowed format; "
            f"allowed are {', '.join(FORMATS)}"
        ) from error
    except ImageError:
        raise
    except DAMAGED as error:
        raise ImageError(f"damaged image data: {error}; send the whole file") from error


def _check_pixels(image: Image.Image, num_frames: int, max_pixels: int) -> None:
    if image.width * image.height * num_frames > max_pixels:
        raise ImageError(
            f"an image of {image.width}x{image.height} pixels and {num_frames} frame(s); at most "
            f"{max_pixels} pixels are allowed: scale it down first"
        )
