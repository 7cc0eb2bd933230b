"""Pictures of digits in strokes, and clips of four frames in which a digit moves or changes.

Drawn with Pillow at four times the size: every stroke model is scaled, slanted, turned and shifted
at random, in a random dark ink of random width on a random light ground, with noise.
"""

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

NUM_FRAMES = 4
FINER = 4
"""Drawn at so many times the side, then reduced."""
NOISE = 10.0
"""Standard deviation, of 255."""

STROKES = (
    "50,8 28,25 25,50 28,75 50,92 72,75 75,50 72,25 50,8",
    "32,26 52,8 52,92",
    "22,30 32,13 50,8 68,14 76,30 62,54 20,92 80,92",
    "22,16 48,8 72,18 72,38 46,48 74,58 78,78 52,92 20,85",
    "64,92 64,8 20,66 82,66",
    "76,8 32,8 28,44 54,40 76,56 74,80 50,92 22,84",
    "68,8 42,28 26,58 30,84 50,92 72,82 74,62 52,52 28,64",
    "20,8 80,8 44,92",
    "50,48 30,36 30,18 50,8 70,18 70,36 50,48 26,64 28,84 50,92 72,84 74,64 50,48",
    "72,38 50,50 28,38 28,18 50,8 70,18 72,38 68,70 54,92",
)
"""One line a digit; its points are x,y in hundredths of a box, y downwards."""

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Style:
    """How a digit is written: shares of the side, radians, and colours in 0..255.

    at: centre of its box.
    """

    height: float
    width: float
    slant: float
    turn: float
    pen: float
    at: tuple[float, float]
    ink: tuple[int, ...]
    ground: tuple[int, ...]


def random_style(rng: random.Random, height: tuple[float, float]) -> Style:
    """A style whose digit, of a `height` in the given range, stays about inside the picture."""
    tall = rng.uniform(*height)
    free = (1 - tall) / 2
    return Style(
        height=tall,
        width=tall * rng.uniform(0.6, 0.95),
        slant=rng.uniform(-0.25, 0.25),
        turn=rng.uniform(-0.15, 0.15),
        pen=rng.uniform(0.06, 0.1),
        at=(0.5 + rng.uniform(-free, free), 0.5 + rng.uniform(-free, free)),
        ink=tuple(rng.randint(0, 90) for _ in range(3)),
        ground=tuple(rng.randint(180, 255) for _ in range(3)),
    )


def draw_digit(digit: int, style: Style, side: int, rng: random.Random) -> Image.Image:
    """The digit on a square of `side` pixels; `rng` gives the noise."""
    fine = side * FINER
    image = Image.new("RGB", (fine, fine), style.ground)
    points = [_place(point, style, fine) for point in STROKES[digit].split()]
    pen = max(1, round(style.pen * fine))
    ImageDraw.Draw(image).line(points, fill=style.ink, width=pen, joint="curve")
    reduced = np.asarray(image.reduce(FINER), np.float32)
    noise = np.random.default_rng(rng.getrandbits(64)).normal(0, NOISE, reduced.shape)
    return Image.fromarray(np.clip(reduced + noise, 0, 255).astype(np.uint8))


def moving_clip(
    digit: int, direction: str, side: int, rng: random.Random
) -> tuple[Image.Image, ...]:
    """Four frames of one digit that goes through the middle in a direction of `DIRECTIONS`."""
    style, step = random_style(rng, (0.5, 0.65)), rng.uniform(0.09, 0.13)
    across, down = DIRECTIONS[direction]
    frames = []
    for number in range(NUM_FRAMES):
        gone = step * (number - (NUM_FRAMES - 1) / 2)
        place = (0.5 + across * gone, 0.5 + down * gone)
        frames.append(draw_digit(digit, replace(style, at=place), side, rng))
    return tuple(frames)


def changing_clip(digit: int, other: int, side: int, rng: random.Random) -> tuple[Image.Image, ...]:
    """Four frames in one style: two of a digit, then two of another."""
    style = random_style(rng, (0.7, 0.95))
    shown = (digit, digit, other, other)
    return tuple(draw_digit(one, style, side, rng) for one in shown)


def _place(point: str, style: Style, side: int) -> tuple[float, float]:
    """Pixels of a point of a stroke."""
    x, y = (int(number) / 100 - 0.5 for number in point.split(","))
    y *= style.height
    x = x * style.width - style.slant * y
    cos, sin = math.cos(style.turn), math.sin(style.turn)
    across, down = style.at
    return ((across + cos * x - sin * y) * side, (down + sin * x + cos * y) * side)
