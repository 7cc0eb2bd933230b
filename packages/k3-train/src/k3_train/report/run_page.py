"""`report.html` of a run folder: curves, experts, depth, KDA and updates by head, on one page."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3_core.errors import K3Error
from k3_train.report.html_page import details, page, paragraph, section
from k3_train.report.png import DIVERGING
from k3_train.report.svg import Range, heat_map, histogram, line_chart, range_chart

ROWS, SNAPSHOTS, PAGE = "run.jsonl", "diagnostics.jsonl", "report.html"
MAX_LAYERS = 12
"""Layers with a figure of their own; of more, evenly spaced ones are shown."""
MAX_HEADS = 7
"""Heads with a line of their own; of more, the least, the median and the largest are shown."""
_LOGARITHMIC = {"grad_norm", "lr"}
_NOT_CURVES = {"step", "tokens", "mtp_loss"}
Rows = Sequence[Mapping[str, Any]]


def write_report(folder: Path) -> Path:
    """Write FOLDER/report.html from the rows and snapshots there; returns its path."""
    rows = read_lines(folder / ROWS)
    if not rows:
        raise K3Error(f"{folder} has no rows in {ROWS}: give the folder of a run that took a step")
    snapshots = read_lines(folder / SNAPSHOTS)
    parts = [
        _summary(rows, _json(folder / "environment.json")),
        section("Curves", "Means since the row before.", _curves(rows)),
        section("Experts", _EXPERTS, _experts(snapshots)),
        section("Depth attention", _DEPTH, _depth(snapshots)),
        section("KDA", _KDA, _kda(snapshots)),
        section("Updates by head", _UPDATES, _updates(snapshots)),
        section("Sublayer outputs", "On the probe, at the last snapshot.", _outputs(snapshots)),
        details("Settings", _text(folder / "config.resolved.toml")),
        details("Environment", _text(folder / "environment.json")),
    ]
    path = folder / PAGE
    path.write_text(page(f"Run {folder.resolve().name}", *parts), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none when there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else "not written"


def _summary(rows: Rows, environment: Mapping[str, Any]) -> str:
    last = rows[-1]
    device = environment.get("gpu") or environment.get("device") or "unknown device"
    return paragraph(
        f"{last['step']:,} steps, {last['tokens']:,} tokens, loss {last['loss']:.4f} nats a token; "
        f"{last['tokens_per_s']:,.0f} tokens/s in the last row, on {device}."
    )


def _curves(rows: Rows) -> Iterator[str]:
    # Not every row has every value: an evaluation comes with some of them only.
    names = {name: None for row in rows for name, value in row.items() if _is_number(value)}
    for name in [name for name in names if name not in _NOT_CURVES]:
        series = {name: _points(rows, name)}
        if name == "loss" and any(row["mtp_loss"] for row in rows):
            series["mtp_loss"] = _points(rows, "mtp_loss")
        yield line_chart(series, name, is_log=name in _LOGARITHMIC)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _points(rows: Rows, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


_EXPERTS = (
    "Load: routes that an expert got since the row before, over the mean of its router, on a "
    "logarithmic scale; red is above the mean, blue below. One figure a router, time from left to "
    "right; then all routers at the last snapshot, and the biases that balance them."
)


def _experts(snapshots: Rows) -> Iterator[str]:
    loaded = [one for one in snapshots if one.get("load")]
    if not loaded:
        return
    routers = loaded[-1]["routers"]
    colours: dict[str, Any] = {
        "limits": (-3, 3),
        "scale": DIVERGING,
        "names": ("mean / 8", "mean x 8"),
    }
    span = f"experts by step {loaded[0]['step']} to {loaded[-1]['step']}"
    for index in _spread(len(routers)):
        columns = [_logarithms(one["load"][index]) for one in loaded]
        rows = [list(row) for row in zip(*columns, strict=True)]
        yield heat_map(rows, f"load of layer {routers[index]}", x=span, **colours)
    last = [_logarithms(load) for load in loaded[-1]["load"]]
    labels = [str(layer) for layer in routers]
    title = f"load by layer, step {loaded[-1]['step']}"
    yield heat_map(last, title, row_labels=labels, x="experts", **colours)
    biases = [bias for router in snapshots[-1]["bias"] for bias in router]
    yield histogram(biases, f"biases of all routers, step {snapshots[-1]['step']}", x="bias")


def _logarithms(loads: Sequence[float]) -> list[float]:
    return [math.log2(max(load, 1e-9)) for load in loads]


_DEPTH = (
    "Mean weight that each place that reads the depth (attention and MLP of a layer, the output) "
    "gives to each source: the embedding first, the running block sum (or the latest output) last."
)


def _depth(snapshots: Rows) -> Iterator[str]:
    mixed = [one for one in snapshots if one.get("depth")]
    for one in dict.fromkeys((0, len(mixed) - 1)) if mixed else ():
        weights = mixed[one]["depth"]
        title = f"depth attention, step {mixed[one]['step']}"
        yield heat_map(list(weights.values()), title, row_labels=list(weights), x="sources")


_KDA = (
    "Memory: tokens after which a channel has forgotten all but 1/e, on the probe: 5% to 95% of "
    "tokens and channels of a head, the middle half thick, the median as a dot. State norm: "
    "Frobenius norm of each head's final state, mean over the probe's sequences."
)


def _kda(snapshots: Rows) -> Iterator[str]:
    if not snapshots or not snapshots[-1]["memory"]:
        return
    last = snapshots[-1]["memory"]
    layers = list(last)
    for index in _spread(len(layers)):
        rows = [
            Range(f"head {head}", q[2], (q[1], q[3]), (q[0], q[4]))
            for head, q in enumerate(last[layers[index]])
        ]
        yield range_chart(rows, f"memory of layer {layers[index]}", x="tokens", is_log=True)
    for index in _spread(len(layers)):
        layer = layers[index]
        norms = [(one["step"], one["state_norm"][layer]) for one in snapshots]
        yield line_chart(_by_head(norms), f"state norm of layer {layer}")


_UPDATES = (
    "Frobenius norm of the change of each head's matrix in one step, weight decay included, for "
    "the matrices that Per-Head Muon splits."
)


def _updates(snapshots: Rows) -> Iterator[str]:
    updated = [one for one in snapshots if one.get("update_norm")]
    names = list(updated[-1]["update_norm"]) if updated else []
    for index in _spread(len(names)):
        norms = [(one["step"], one["update_norm"][names[index]]) for one in updated]
        short = names[index].partition("layers.")[2].removesuffix(".weight")
        yield line_chart(_by_head(norms), f"update of {short}", is_log=True)


def _outputs(snapshots: Rows) -> Iterator[str]:
    if not snapshots:
        return
    last = snapshots[-1]
    for key, title in (("out_rms", "root mean square"), ("out_max", "largest magnitude")):
        series = {place: list(enumerate(values)) for place, values in last[key].items()}
        yield line_chart(series, f"{title} by layer", x="layer", is_log=True)


def _by_head(rows: Sequence[tuple[int, Sequence[float]]]) -> dict[str, list[tuple[float, float]]]:
    num_heads = len(rows[0][1])
    if num_heads <= MAX_HEADS:
        picked = {f"head {head}": head for head in range(num_heads)}
        return {name: [(step, values[i]) for step, values in rows] for name, i in picked.items()}
    picked = {"least head": 0, "median": num_heads // 2, "largest": num_heads - 1}
    ranked = [(step, sorted(values)) for step, values in rows]
    return {name: [(step, values[i]) for step, values in ranked] for name, i in picked.items()}


def _spread(count: int) -> list[int]:
    """At most `MAX_LAYERS` indices, evenly spaced, the first and the last among them."""
    if count <= MAX_LAYERS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)]
