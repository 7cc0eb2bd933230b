"""Small charts as inline SVG text: lines, heat maps, ranges. No library, no script, no network."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3_train.report.png import SEQUENTIAL, Colour, colour_of, data_uri

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 34
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Okabe and Ito's colours, told apart by every kind of colour vision."""
MAX_POINTS = 300

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Range:
    """One row of a range chart: a middle, an inner and an outer interval, single values."""

    label: str
    middle: float
    inner: tuple[float, float] | None = None
    outer: tuple[float, float] | None = None
    values: tuple[float, ...] = ()


class Axis:
    """Maps values to pixels, linearly or by logarithm, and knows round ticks."""

    def __init__(self, values: Sequence[float], start: float, stop: float, is_log: bool) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
        low, high = (min(finite), max(finite)) if finite else (1.0, 2.0)
        if low == high:
            low, high = (low / 1.5, high * 1.5) if is_log else (low - 0.5, high + 0.5)
        self.low, self.high, self.is_log = low, high, is_log
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return self._start + share * (self._stop - self._start)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value

    def ticks(self) -> list[float]:
        """A few round values inside the range."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(powers) > 3 else (1, 2, 5)
            marks = [step * 10.0**power for power in powers for step in steps]
            inside = [mark for mark in marks if self.low <= mark <= self.high]
            return inside if len(inside) > 1 else [self.low, self.high]
        raw = (self.high - self.low) / 4
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A value in few characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


def line_chart(
    series: Mapping[str, Points], title: str, *, x: str = "step", is_log: bool = False
) -> str:
    """Lines by name over one axis; a logarithmic y axis leaves out what is not positive."""
    lines = {name: _thinned(points) for name, points in series.items()}
    shown = [p for points in lines.values() for p in points]
    x_axis = Axis([p[0] for p in shown], LEFT, WIDTH - RIGHT, False)
    y_axis = Axis([p[1] for p in shown], HEIGHT - BOTTOM, TOP, is_log)
    body = [_grid(x_axis, y_axis, x)]
    for index, (name, points) in enumerate(lines.items()):
        kept = [p for p in points if math.isfinite(p[1]) and (p[1] > 0 or not is_log)]
        path = " ".join(f"{x_axis(a):.1f},{y_axis(b):.1f}" for a, b in kept)
        colour = PALETTE[index % len(PALETTE)]
        body.append(f'<polyline points="{path}" stroke="{colour}"><title>{_text(name)}</title>')
        body.append("</polyline>")
    return _figure(title, "".join(body), WIDTH, HEIGHT, _legend(list(lines)))


def heat_map(
    rows: Sequence[Sequence[float]],
    title: str,
    *,
    row_labels: Sequence[str] = (),
    x: str = "",
    limits: tuple[float, float] = (0, 1),
    scale: Sequence[Colour] = SEQUENTIAL,
    names: tuple[str, str] | None = None,
) -> str:
    """Rows of values as colours between `limits`; short rows are filled with grey.

    names: what to write at the two ends of the colour bar instead of the limits.
    """
    width = max(len(row) for row in rows)
    low, high = limits
    filled = [[*row, *([math.nan] * (width - len(row)))] for row in rows]
    pixels = [[(v - low) / (high - low) for v in row] for row in filled]
    cell = max(6.0, min(18.0, 220 / len(rows)))
    bottom = TOP + cell * len(rows)
    space = WIDTH - LEFT - RIGHT
    body = [
        f'<image x="{LEFT}" y="{TOP}" width="{space}" height="{bottom - TOP:.0f}" '
        f'preserveAspectRatio="none" href="{data_uri(pixels, scale)}"/>'
    ]
    every = max(1, math.ceil(11 * len(row_labels) / (bottom - TOP)))
    for index, label in list(enumerate(row_labels))[::every]:
        y = TOP + cell * (index + 0.5) + 3
        body.append(f'<text class="end" x="{LEFT - 5}" y="{y:.1f}">{_text(label)}</text>')
    ends = names or (number(low), number(high))
    body.append(f'<text x="{LEFT}" y="{bottom + 14:.0f}">{_text(x)}</text>')
    body.append(_colour_bar(ends, scale, bottom + 8))
    return _figure(title, "".join(body), WIDTH, bottom + 24)


def range_chart(rows: Sequence[Range], title: str, *, x: str, is_log: bool = False) -> str:
    """A row for each item: outer interval thin, inner thick, middle and single values as dots."""
    values = [v for r in rows for v in (r.middle, *(r.inner or ()), *(r.outer or ()), *r.values)]
    left = max(LEFT, 7 + 6.2 * max(len(row.label) for row in rows))
    height = TOP + 17 * len(rows) + BOTTOM
    axis = Axis(values, left + 8, WIDTH - RIGHT - 8, is_log)
    body = [_vertical_grid(axis, height, x)]
    for index, row in enumerate(rows):
        y = TOP + 17 * index + 9
        body.append(f'<text class="end" x="{left - 5:.0f}" y="{y + 4}">{_text(row.label)}</text>')
        for interval, width in ((row.outer, 1.5), (row.inner, 5)):
            if interval and all(math.isfinite(v) for v in interval):
                a, b = (axis(v) for v in interval)
                stroke = f'stroke="{PALETTE[0]}" stroke-width="{width}"'
                body.append(f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" {stroke}/>')
        dots = [(v, 2.2, PALETTE[6]) for v in row.values] + [(row.middle, 3.6, PALETTE[1])]
        for value, radius, colour in dots:
            if math.isfinite(value):
                spot = f'cx="{axis(value):.1f}" cy="{y}" r="{radius}" fill="{colour}"'
                body.append(f"<circle {spot}><title>{number(value)}</title></circle>")
    return _figure(title, "".join(body), WIDTH, height)


def histogram(values: Sequence[float], title: str, *, x: str, num_bins: int = 40) -> str:
    """Counts of values in equal bins."""
    low, high = min(values), max(values)
    width = (high - low) / num_bins or 1.0
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    x_axis = Axis([low, low + width * num_bins], LEFT, WIDTH - RIGHT, False)
    y_axis = Axis([0, max(counts)], HEIGHT - BOTTOM, TOP, False)
    body = [_grid(x_axis, y_axis, x)]
    for index, count in enumerate(counts):
        a, b = x_axis(low + index * width), x_axis(low + (index + 1) * width)
        y = y_axis(count)
        size = f'width="{max(0.5, b - a - 0.5):.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
        body.append(f'<rect x="{a:.1f}" y="{y:.1f}" {size} fill="{PALETTE[0]}"/>')
    return _figure(title, "".join(body), WIDTH, HEIGHT)


def _thinned(points: Points) -> Points:
    """At most `MAX_POINTS` means of neighbours; the first and the last point stay as they are."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil((len(points) - 2) / (MAX_POINTS - 2))
    inner = points[1:-1]
    groups = [inner[i : i + size] for i in range(0, len(inner), size)]
    means = [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]
    return [points[0], *means, points[-1]]


def _grid(x_axis: Axis, y_axis: Axis, x: str) -> str:
    parts = [_vertical_grid(x_axis, HEIGHT, x)]
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{LEFT - 5}" y="{y + 4:.1f}">{number(tick)}</text>'
        )
    return "".join(parts)


def _vertical_grid(axis: Axis, height: float, x: str) -> str:
    bottom = height - BOTTOM
    parts = [f'<text class="end" x="{WIDTH - RIGHT}" y="{height - 4}">{_text(x)}</text>']
    for tick in axis.ticks():
        at = axis(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="mid" x="{at:.1f}" y="{bottom + 14}">{number(tick)}</text>'
        )
    return "".join(parts)


def _colour_bar(names: tuple[str, str], scale: Sequence[Colour], y: float) -> str:
    right, width = WIDTH - RIGHT - 50, 60
    steps = [colour_of(i / 11, scale) for i in range(12)]
    bars = "".join(
        f'<rect x="{right - width + 5 * i}" y="{y:.0f}" width="5" height="8" fill="rgb{c}"/>'
        for i, c in enumerate(steps)
    )
    low, high = (_text(name) for name in names)
    return (
        f'{bars}<text class="end" x="{right - width - 4}" y="{y + 8:.0f}">{low}</text>'
        f'<text x="{right + 4}" y="{y + 8:.0f}">{high}</text>'
    )


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = (
        f'<span><i style="background:{PALETTE[i % len(PALETTE)]}"></i>{_text(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _figure(title: str, body: str, width: float, height: float, legend: str = "") -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    label = _text(title)
    return (
        f'<figure><svg {size} role="img" aria-label="{label}">'
        f'<text class="title" x="4" y="15">{label}</text>{body}</svg>{legend}</figure>\n'
    )


def _text(value: object) -> str:
    return html.escape(str(value))
