"""Untrusted image data: limits hold before decoding, damage is an `ImageError`."""

import io
import struct
import zlib

import pytest
from PIL import Image

from k3_core.image import ImageError, open_animation, open_image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels; decoding it would fail."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT"


def animation(colors: list, durations: list[int], kind: str = "GIF") -> bytes:
    first, *rest = [Image.new("RGB", (6, 4), color) for color in colors]
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(
        first, kind, save_all=True, append_images=rest, duration=durations, loop=0, **options
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_allowed_formats_are_decoded(kind: str) -> None:
    image = open_image(encoded(Image.new("RGB", (5, 3), RED), kind))
    assert image.size == (5, 3)
    red, green, blue = image.convert("RGB").getpixel((2, 1))
    assert red > 250 and green < 5 and blue < 5


def test_other_formats_are_refused() -> None:
    with pytest.raises(ImageError, match="allowed are PNG, JPEG"):
        open_image(encoded(Image.new("RGB", (5, 3)), "TIFF"))


def test_pixels_are_limited_before_decoding() -> None:
    with pytest.raises(ImageError, match=r"9x8 pixels .* at most 71"):
        open_image(png_header(9, 8), max_pixels=71)
    with pytest.raises(ImageError, match="damaged"):  # the limit alone stopped it above
        open_image(png_header(9, 8), max_pixels=72)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_500, 60_000])
def test_bombs_are_refused(side: int) -> None:
    with pytest.raises(ImageError, match="pixels"):
        open_image(png_header(side, side))


def test_bytes_are_limited() -> None:
    with pytest.raises(ImageError, match="bytes of image data; at most 10"):
        open_image(encoded(Image.new("RGB", (5, 3)), "PNG"), max_bytes=10)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_data_is_an_image_error(kind: str) -> None:
    data = encoded(Image.effect_noise((40, 30), 90).convert("RGB"), kind)
    with pytest.raises(ImageError):
        open_image(data[: len(data) // 2])
    for place in range(0, min(len(data), 400), 3):
        broken = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        try:
            assert open_image(broken, max_pixels=10**6).width > 0
        except ImageError as error:
            assert str(error)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_animations_are_sampled_by_time(kind: str) -> None:
    data = animation([RED, GREEN, BLUE], [200, 1000, 400], kind)
    frames = open_animation(data, fps=2.0)  # at 0, 0.5, 1 and 1.5 s
    colors = [frame.convert("RGB").getpixel((3, 2)) for frame in frames]
    assert colors == [RED, GREEN, GREEN, BLUE]
    assert len(open_animation(data, fps=10.0)) == 16


def test_a_still_image_is_an_animation_of_one_frame() -> None:
    [frame] = open_animation(encoded(Image.new("RGB", (5, 3), RED), "PNG"))
    assert frame.size == (5, 3)


def test_animations_are_limited_over_all_frames() -> None:
    data = animation([RED, GREEN, BLUE], [100, 100, 100])
    assert len(open_animation(data, fps=2.0, max_pixels=72)) == 1
    with pytest.raises(ImageError, match=r"3 frame\(s\); at most 71"):
        open_animation(data, fps=2.0, max_pixels=71)


def test_long_durations_do_not_multiply_frames_without_limit() -> None:
    with pytest.raises(ImageError, match=r"frame\(s\); at most 1000 "):
        open_animation(animation([RED, GREEN], [600_000, 100]), max_pixels=1000)


def test_the_rate_is_positive() -> None:
    with pytest.raises(ImageError, match="fps = 0"):
        open_animation(b"", fps=0)
