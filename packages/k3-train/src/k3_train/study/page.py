"""The page of a study, and the list of all studies, from their results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3_core.errors import K3Error
from k3_train.report.html_page import details, page, paragraph, section, table
from k3_train.report.run_page import read_lines
from k3_train.report.svg import Range, line_chart, number, range_chart
from k3_train.study.declare import Arm, Scale, Study, load_study, scale_names, study_names
from k3_train.study.plan import Plan, loss_of
from k3_train.study.runner import RESULTS
from k3_train.study.scaling import describe_law

PAGE, INDEX = "index.html", "index.md"
HIDDEN_SCALES = frozenset({"tiny"})
LABELS = {
    "loss": "held-out loss, nats a token",
    "train_loss": "training loss of the last quarter, nats a token",
    "max_over_mean_load": "max over mean load of the worst router, last quarter",
    "dead_experts": "experts without a token between two rows, all routers, last quarter",
    "balanced_at": "tokens from which on the load stays below 1.3 times the sampling floor",
    "recall_accuracy": "accuracy on held-out recall tasks (a guess: 0.016)",
    "recall_loss": "loss on held-out recall tasks, nats",
    "prefill_ms": "time of a prefill, ms",
    "state_bytes": "bytes of a sequence's state after a prefill",
    "depth_rms": "output of the last MLP over that of the first, root mean squares",
    "grad_norm_max": "largest gradient norm of a row",
    "tokens_per_s": "tokens/s of training",
    "activation_max": "largest output of an MLP on the probe",
    "head_spread": "largest over least head norm of an update, mean over matrices",
    "flops": "FLOPs: 6 for each active parameter and token",
    "active": "active parameters, with the unembedding",
}
_LOGARITHMIC = {"dead_experts", "max_over_mean_load", "grad_norm_max", "activation_max"}
Row = Mapping[str, Any]


def write_page(study: Study, out: Path) -> Path:
    """Write OUT/index.html: a part for each scale that has results."""
    rows = read_lines(out / RESULTS)
    parts = [paragraph(study.question)]
    for name in scale_names():
        own = [row for row in rows if row["scale"] == name]
        if own:
            parts.append(_scale_part(study, name, own))
    path = out / PAGE
    path.write_text(page(f"Study: {study.title}", *parts), encoding="utf-8")
    return path


def write_index(folder: Path) -> Path:
    """Write the list of the shipped studies with how much of each is run."""
    lines = [
        "# Studies",
        "",
        "The same model trained in arms that differ in one thing. `k3 train study NAME` runs what",
        "is missing and draws the pages anew; `results.jsonl` beside a page has a row a run.",
        "",
        "| study | question | runs |",
        "|---|---|---|",
    ]
    for name in study_names():
        study, out = load_study(name), folder / name
        counts = "; ".join(_counts(study, read_lines(out / RESULTS))) or "none"
        title = f"[{study.title}]({name}/{PAGE})" if (out / PAGE).is_file() else study.title
        lines.append(f"| {title} | {study.question} | {counts} |")
    path = folder / INDEX
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _counts(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    for name in scale_names():
        own = [row for row in rows if row["scale"] == name]
        if own and name not in HIDDEN_SCALES:
            scale = study.scale(name)
            plan = Plan(study.all_arms(), scale, own)
            run = sum(bool(_full_rows(plan, arm)) for arm in plan.arms)
            yield f"{name}: {run} of {len(plan.arms)} arms ({scale.banner})"


def _scale_part(study: Study, name: str, rows: list[dict]) -> str:
    scale = study.scale(name)
    plan = Plan(study.all_arms(), scale, rows)
    found = {arm.name: _full_rows(plan, arm) for arm in plan.arms}
    device = ", ".join(sorted({row["device"] for row in rows}))
    about = (
        f"{scale.tokens:,} tokens a run, if its arm does not say otherwise; seeds: "
        f"{scale.seeds}; learning rates searched on {scale.search_tokens:,} tokens; on {device}. "
        "A bar is the mean of the seeds plus and minus their standard deviation; one seed has no "
        "bar. A dash: not reached, or the run stopped."
    )
    return (
        f"<h2>Scale {name}</h2>"
        + paragraph(scale.banner, "banner")
        + paragraph(about)
        + table(_head(study), (_table_row(study, plan, arm, found[arm.name]) for arm in plan.arms))
        + (_law_part(found) if study.law else "")
        + section("Measures", "Dots are single seeds.", _measures(study, found))
        + section("Curves", "Seed 0 of each arm.", _curves(study, found))
        + _search_part(plan)
        + details("What the arms change", "\n".join(_describe(arm) for arm in plan.arms))
        + details("Settings of the scale", _settings(scale))
    )


def _full_rows(plan: Plan, arm: Arm) -> list[Row]:
    rows = (plan.row(job) for job in plan.full(arm))
    return [row for row in rows if row is not None]


def _head(study: Study) -> list[str]:
    return ["arm", "runs", "rate", *study.shown]


def _table_row(study: Study, plan: Plan, arm: Arm, rows: list[Row]) -> list[str]:
    if not rows:
        return [arm.name, "not run", *[""] * (1 + len(study.shown))]
    stopped = sum(row["status"] != "finished" for row in rows)
    runs = f"{len(rows)} of {plan.scale.seeds}" + (f", {stopped} stopped" if stopped else "")
    cells = [_mean_text(_values(rows, name)) for name in study.shown]
    return [arm.name, runs, f"x{rows[0]['rate']:g}", *cells]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return "-"
    text = number(statistics.fmean(values))
    return f"{text} ± {number(statistics.stdev(values))}" if len(values) > 1 else text


def _measures(study: Study, found: Mapping[str, list[Row]]) -> Iterator[str]:
    for name in study.shown:
        ranges = []
        for arm, rows in found.items():
            values = _values(rows, name)
            if values:
                mean = statistics.fmean(values)
                spread = statistics.stdev(values) if len(values) > 1 else None
                bar = None if spread is None else (mean - spread, mean + spread)
                ranges.append(Range(arm, mean, None, bar, tuple(values)))
        if ranges:
            is_log = name in _LOGARITHMIC and all(one.middle > 0 for one in ranges)
            yield range_chart(ranges, name, x=LABELS.get(name, name), is_log=is_log)


def _curves(study: Study, found: Mapping[str, list[Row]]) -> Iterator[str]:
    """Lines of at most seven arms a figure, variant by variant."""
    variants = [f"/{one.name}" for one in study.variants] or [""]
    for name in ("loss", "max_over_mean_load", "dead_experts"):
        if name != "loss" and name not in study.shown:
            continue
        for variant in variants:
            lines = {}
            for arm, rows in found.items():
                if arm.endswith(variant) and rows and "curves" in rows[0]:
                    curves = rows[0]["curves"]
                    points = zip(curves["tokens"], curves[name], strict=True)
                    lines[arm] = [(x, y) for x, y in points if y is not None]
            if lines:
                title = f"{name} while training {variant.strip('/')}"
                is_log = name == "max_over_mean_load"
                yield line_chart(lines, title, x="tokens", is_log=is_log)


def _law_part(found: Mapping[str, list[Row]]) -> str:
    """The fit over all finished runs, or why there is none."""
    rows = [row for own in found.values() for row in own if row["status"] == "finished"]
    try:
        text = describe_law(rows)
    except K3Error as error:
        text = f"No fit: {error}."
    return "<h2>Fit</h2>" + "".join(paragraph(line) for line in text.splitlines())


def _search_part(plan: Plan) -> str:
    lines = []
    for arm in plan.arms:
        jobs = plan.search(arm)
        rows = [row for row in map(plan.row, jobs) if row is not None]
        if not rows:
            continue
        losses = [f"x{row['rate']:g} {number(loss_of(row))}" for row in rows]
        rates = [job.rate for job in jobs]
        edge = ", at the edge" if plan.rate(arm) in (min(rates), max(rates)) else ""
        chosen = plan.rate(arm)
        end = f"chosen x{chosen:g}{edge}" if chosen is not None else "not complete"
        lines.append(f"{arm.name}: {', '.join(losses)}; {end}")
    text = "Held-out loss of the short runs by factor on all peak rates.\n" + "\n".join(lines)
    return details("Search of the learning rates", text) if lines else ""


def _describe(arm: Arm) -> str:
    changes = [f"{key} = {value}" for key, value in {**arm.model, **arm.set}.items()]
    return f"{arm.name}: {arm.about} {', '.join(changes) or 'nothing'}"


def _settings(scale: Scale) -> str:
    lines = [
        f"{key} = {value}" for key, value in vars(scale).items() if key not in ("model", "set")
    ]
    lines += [f"{key} = {value}" for key, value in {**scale.model, **scale.set}.items()]
    return "\n".join(lines)
