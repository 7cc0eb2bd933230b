"""Pictures, the code that draws them and the coordinates of what they show."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from k3_core.errors import K3Error
from k3_train.data.renders import draw_pairs, draw_scene, write_pairs


def test_the_code_draws_the_picture() -> None:
    for seed in range(60):
        scene = draw_scene(random.Random(seed), size=(96, 64))
        names: dict[str, Image.Image] = {}
        exec(scene.code(), names)
        assert names["image"].size == (96, 64)
        assert names["image"].tobytes() == scene.image().tobytes()


def test_coordinates_are_those_of_the_pixels() -> None:
    """The last shape is covered by none: its colour fills its box, but for a line's width."""
    for seed in range(60):
        scene = draw_scene(random.Random(seed), size=(96, 64))
        shape = scene.shapes[-1]
        pixels = np.asarray(scene.image()) == ImageColor.getrgb(shape.colour)
        if sum(one.colour == shape.colour for one in scene.shapes) > 1:
            continue
        rows, columns = np.nonzero(pixels.all(-1))
        found = (columns.min(), rows.min(), columns.max(), rows.max())
        slack = 2 if shape.kind in ("line", "triangle") else 0
        assert np.abs(np.subtract(found, shape.box)).max() <= slack
        expected = np.divide(shape.box, (96, 64, 96, 64))
        assert np.abs(np.subtract(scene.unit_box(shape), expected)).max() <= 0.000501
        assert all(0 <= share <= 1 for share in scene.unit_box(shape))


def test_pairs_are_written_with_their_pictures(tmp_path: Path) -> None:
    manifest = write_pairs(tmp_path / "a", 12, seed=3)
    rows = [json.loads(line) for line in (tmp_path / "a" / "pairs.jsonl").read_text().splitlines()]
    assert manifest["num_scenes"] == 12 and len(rows) == 36
    assert {row["task"] for row in rows} == {"code", "pixels", "unit"}
    first = next(iter(draw_pairs(3)))
    assert [row["answer"] for row in rows[:3]] == [pair.answer for pair in first]
    with Image.open(tmp_path / "a" / rows[0]["image"]) as image:
        assert image.tobytes() == first[0].image.tobytes()
    again = write_pairs(tmp_path / "b", 12, seed=3)
    assert again == manifest
    with pytest.raises(K3Error, match="exists"):
        write_pairs(tmp_path / "a", 1)


def test_nothing_is_left_of_an_interrupted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> object:
        yield from islice(draw_pairs(0), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr("k3_train.data.renders.draw_pairs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_pairs(tmp_path / "a", 5)
    assert list(tmp_path.iterdir()) == []
