"""Pictures with the code that draws them, and the coordinates of what they show (report 6).

A scene is drawn with Pillow; its code is what a person would write for it. Coordinates are given in
pixels and as shares of width and height in [0, 1].
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from k3_core.errors import K3Error
from k3_train.data.clean.frames import FrameIndex

FORMAT = "k3-renders/1"
COLOURS = ("black", "blue", "brown", "gray", "green", "orange", "pink", "purple", "red", "yellow")
SHAPES = ("rectangle", "ellipse", "line", "triangle")
DIGITS = 3
"""Of a coordinate in [0, 1]."""


@dataclass(frozen=True)
class Shape:
    """One object: `box` is (left, top, right, bottom) in pixels, both ends drawn."""

    kind: str
    colour: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        """Colour and kind; no two shapes of a scene have the same."""
        return f"{self.colour} {self.kind}"

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Of a triangle on the lower side of the box."""
        left, top, right, bottom = self.box
        return [(left, bottom), ((left + right) // 2, top), (right, bottom)]

    def code(self) -> str:
        """The line that draws it on `draw`."""
        if self.kind == "line":
            return f"draw.line({self.box}, fill={self.colour!r}, width=2)".replace("'", '"')
        if self.kind == "triangle":
            return f"draw.polygon({self.corners}, fill={self.colour!r})".replace("'", '"')
        return f"draw.{self.kind}({self.box}, fill={self.colour!r})".replace("'", '"')

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw it as `code` says."""
        if self.kind == "line":
            draw.line(self.box, fill=self.colour, width=2)
        elif self.kind == "triangle":
            draw.polygon(self.corners, fill=self.colour)
        else:
            getattr(draw, self.kind)(self.box, fill=self.colour)


@dataclass(frozen=True)
class Scene:
    """Shapes on a white ground, later ones over earlier ones; width and height in pixels."""

    width: int
    height: int
    shapes: tuple[Shape, ...]

    def image(self) -> Image.Image:
        """The picture."""
        image = Image.new("RGB", (self.width, self.height), "white")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            shape.draw(draw)
        return image

    def code(self) -> str:
        """A program for Pillow that leaves the picture in `image`."""
        lines = [
            "from PIL import Image, ImageDraw",
            "",
            f'image = Image.new("RGB", ({self.width}, {self.height}), "white")',
            "draw = ImageDraw.Draw(image)",
            *(shape.code() for shape in self.shapes),
        ]
        return "\n".join(lines) + "\n"

    def unit_box(self, shape: Shape) -> tuple[float, float, float, float]:
        """The box of a shape as shares of width and height, rounded to three digits."""
        left, top, right, bottom = shape.box
        shares = (left / self.width, top / self.height, right / self.width, bottom / self.height)
        return tuple(round(share, DIGITS) for share in shares)  # type: ignore[return-value]


@dataclass(frozen=True)
class RenderPair:
    """A picture with a question and its answer; `task` is "code", "pixels" or "unit"."""

    image: Image.Image
    prompt: str
    answer: str
    task: str


def draw_scene(rng: random.Random, *, size: tuple[int, int] = (112, 112), most: int = 4) -> Scene:
    """A random scene of one to `most` shapes with different names; size in pixels, from 16."""
    width, height = size
    names = rng.sample([(c, k) for c in COLOURS for k in SHAPES], rng.randint(1, most))
    shapes = []
    for colour, kind in names:
        across, down = (rng.randint(max(6, side // 8), side // 2) for side in size)
        left, top = rng.randrange(width - across), rng.randrange(height - down)
        shapes.append(Shape(kind, colour, (left, top, left + across, top + down)))
    return Scene(width, height, tuple(shapes))


def ask_about(scene: Scene, rng: random.Random) -> list[RenderPair]:
    """The three questions about a scene: its code, and where one shape is, twice."""
    image, shape = scene.image(), rng.choice(scene.shapes)
    where = f"Where is the {shape.name}? Give left, top, right, bottom"
    unit = ", ".join(f"{share:.{DIGITS}f}" for share in scene.unit_box(shape))
    return [
        RenderPair(image, "Write the Pillow code that draws this picture.", scene.code(), "code"),
        RenderPair(image, f"{where} in pixels.", ", ".join(map(str, shape.box)), "pixels"),
        RenderPair(image, f"{where} as shares of width and height.", unit, "unit"),
    ]


def draw_pairs(seed: int, *, size: tuple[int, int] = (112, 112)) -> Iterator[list[RenderPair]]:
    """Without end, the questions about one scene after the other, a function of seed and number."""
    number = 0
    while True:
        rng = random.Random(f"{seed}:{number}")
        yield ask_about(draw_scene(rng, size=size), rng)
        number += 1


def write_pairs(
    out: Path, num_scenes: int, seed: int = 0, *, size: tuple[int, int] = (112, 112)
) -> dict[str, object]:
    """Write `num_scenes` different pictures and their questions to the folder `out`.

    `images/NUMBER.png`, `pairs.jsonl` (image, prompt, answer, task) and `manifest.json`, which is
    returned. Scenes that look like an earlier one are left out. The folder appears when complete.
    """
    if out.exists():
        raise K3Error(f"{out} exists: choose another folder")
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    (draft / "images").mkdir(parents=True)
    index, kept, alike = FrameIndex(), 0, 0
    try:
        with (draft / "pairs.jsonl").open("w", encoding="utf-8") as lines:
            for pairs in draw_pairs(seed, size=size):
                if kept == num_scenes:
                    break
                if index.find_or_add([pairs[0].image]) is not None:
                    alike += 1
                    continue
                name = f"images/{kept:06d}.png"
                pairs[0].image.save(draft / name)
                for pair in pairs:
                    row = {"image": name, "prompt": pair.prompt, "answer": pair.answer}
                    lines.write(json.dumps(row | {"task": pair.task}) + "\n")
                kept += 1
        manifest = {
            "format": FORMAT,
            "seed": seed,
            "size": size,
            "num_scenes": kept,
            "num_alike": alike,
            "sha256": hashlib.sha256((draft / "pairs.jsonl").read_bytes()).hexdigest(),
        }
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest
