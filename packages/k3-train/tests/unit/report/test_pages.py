"""Charts are well-formed, pages are whole and ask for nothing outside."""

import base64
import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from k3_core.cli.app import run
from k3_train.report.png import DIVERGING, MISSING, SEQUENTIAL, colour_of, data_uri
from k3_train.report.svg import Axis, Range, heat_map, histogram, line_chart, number, range_chart


def figures(text):
    return [ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_a_heat_map_has_the_pixels_of_its_values():
    uri = data_uri([[0.0, 1.0], [0.5, math.nan]], DIVERGING)
    picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    pixels = [picture.getpixel((x, y)) for y in (0, 1) for x in (0, 1)]
    assert pixels == [DIVERGING[0], DIVERGING[2], DIVERGING[1], MISSING]


def test_colours_are_clipped_and_between_their_neighbours():
    assert colour_of(-1, SEQUENTIAL) == SEQUENTIAL[0]
    assert colour_of(7, SEQUENTIAL) == SEQUENTIAL[2]
    for low, value, high in zip(
        SEQUENTIAL[0], colour_of(0.25, SEQUENTIAL), SEQUENTIAL[1], strict=True
    ):
        assert min(low, high) <= value <= max(low, high)


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_puts_its_ends_and_round_ticks_inside(is_log):
    axis = Axis([0.02, 300.0, math.nan], 10, 110, is_log)
    assert (axis(0.02), axis(300.0)) == pytest.approx((10, 110))
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(0.02 <= tick <= 300 for tick in ticks)


@pytest.mark.parametrize("values", [[5.0], [2.0, 2.0], [], [math.nan, 1.0]])
def test_charts_of_few_or_odd_values_are_well_formed(values):
    points = list(enumerate(values))
    texts = [line_chart({"a<b": points}, "t & u"), line_chart({"a": points}, "log", is_log=True)]
    if values:
        texts.append(range_chart([Range("x", v, None, (v, v), (v,)) for v in values], "r", x="y"))
        texts.append(heat_map([values, []], "h"))
    assert all(len(figures(text)) == 1 for text in texts)


def test_long_lines_are_thinned_to_means_that_keep_the_ends():
    (figure,) = figures(line_chart({"a": [(i, float(i % 2)) for i in range(10_001)]}, "saw"))
    points = figure.find("polyline").get("points").split()
    assert 100 <= len(points) <= 300


def test_a_histogram_counts_every_value():
    (figure,) = figures(histogram([0.0, 0.0, 1.0], "h", x="v", num_bins=2))
    heights = [float(bar.get("height")) for bar in figure.iter("rect")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.5, 12345.0, 1e-5, 3e7)] == [
        "0",
        "0.5",
        "12,345",
        "1e-5",
        "3e7",
    ]


@pytest.fixture
def fitted(tmp_path, tiny_config, tiny_data):
    options = ["data.tokens_per_batch=48", "data.max_seq_len=32", "run.log_every=1"]
    sets = [f"--set={one}" for one in (*options, f"model.config='{tiny_config}'")]
    out = tmp_path / "run"
    assert run(["train", "fit", f"--out={out}", "--steps=2", f"--data={tiny_data}", *sets]) == 0
    return out


def test_a_run_ends_with_a_page_that_needs_no_network(fitted, capsys):
    page = fitted / "report.html"
    first = page.read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", first)
    assert titles == [
        "Curves", "Experts", "Depth attention", "KDA", "Updates by head", "Sublayer outputs",
    ]  # fmt: skip
    assert len(figures(first)) > 15
    assert not re.search(r"<script|https?://|src=|@import", first)
    page.unlink()
    assert run(["train", "report", str(fitted)]) == 0
    assert page.read_text() == first


def test_a_page_without_diagnostics_has_the_curves(fitted):
    (fitted / "diagnostics.jsonl").unlink()
    assert run(["train", "report", str(fitted)]) == 0
    assert re.findall(r"<h2>(.*?)</h2>", (fitted / "report.html").read_text()) == ["Curves"]


def test_values_of_events_get_a_curve_and_a_folder_without_rows_an_error(fitted, capsys):
    rows = [json.loads(line) | {"clipped": 3} for line in (fitted / "run.jsonl").open()]
    (fitted / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(["train", "report", str(fitted)])
    assert 'aria-label="clipped"' in (fitted / "report.html").read_text()
    (fitted / "run.jsonl").unlink()
    assert run(["train", "report", str(fitted)]) != 0
    assert "has no rows in run.jsonl" in capsys.readouterr().err
