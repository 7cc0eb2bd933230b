"""One run of a study: train, measure, and give one row for results.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from k3_core.config.counts import count_parameters
from k3_core.errors import K3Error
from k3_train.loop.session import Session, start
from k3_train.report.diagnostics import FILE as SNAPSHOTS
from k3_train.report.run_page import ROWS, read_lines
from k3_train.study.data import TRAIN
from k3_train.study.declare import Arm, Scale
from k3_train.study.measure import from_rows, from_snapshots, measure
from k3_train.study.settings import Job, train_config

CURVES = ("loss", "max_over_mean_load", "dead_experts")


def run_job(study: str, arm: Arm, scale: Scale, job: Job, work: Path) -> dict:
    """Train and measure one run below `work`; the row has plain JSON values.

    A run that stops by itself (a loss that is not finite) is a result, with what it said; one that
    a signal ends is none (K3Error).
    """
    folder = work / "runs" / f"{arm.name.replace('/', '-')}-{job.phase}-{job.rate:g}-{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    config = train_config(arm, scale, job, work / "data" / TRAIN, folder)
    started, busy = time.perf_counter(), time.process_time()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"study": study, "scale": scale.name, **asdict(job), "status": "finished"}
    with (folder / "log.txt").open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        session, signal = start(config, folder, started=started), ""
        try:
            signal = session.train(steps=None, minutes=None)
        except K3Error as error:
            row |= {"status": "stopped", "reason": str(error)}
    if signal:
        raise K3Error(f"a run of arm {arm.name} was ended by {signal}; it does not count")
    rows, snapshots = read_lines(folder / ROWS), read_lines(folder / SNAPSHOTS)
    if rows:
        row |= from_rows(rows, load_floor(session, rows))
        row |= {"curves": {name: _curve(rows, name) for name in ("tokens", *CURVES)}}
    if row["status"] == "finished":
        row |= _measured(session, scale, work)
        row |= from_snapshots(snapshots) if snapshots else {}
    row |= _description(session, job)
    row["seconds"] = round(time.perf_counter() - started, 1)
    row["cpu_seconds"] = round(time.process_time() - busy, 1)
    shutil.rmtree(folder)
    return _plain(row)


def load_floor(session: Session, rows: list[dict]) -> float:
    """Max over mean load of a perfect balance on as many routes as lie between two rows."""
    text, config = session.model_config.text, session.config
    tokens = config.data.tokens_per_batch * config.run.accumulation * config.run.log_every
    per_expert = tokens * text.num_experts_per_token / text.num_experts
    return 1 + math.sqrt(2 * math.log(text.num_experts) / per_expert)


def _measured(session: Session, scale: Scale, work: Path) -> dict[str, float]:
    return measure(
        session.trainer.state.model,
        work / "data",
        eval_tokens=scale.eval_tokens,
        tokens_per_batch=session.config.data.tokens_per_batch,
        max_seq_len=session.config.data.max_seq_len,
        prefill_tokens=scale.prefill_tokens,
    )


def _description(session: Session, job: Job) -> dict[str, Any]:
    """FLOPs are 6 for each active parameter and token, the unembedding counted."""
    counts = count_parameters(session.model_config)
    device = session.trainer.stepper.device
    is_cuda = device.type == "cuda"
    return {
        "parameters": counts.total,
        "active": counts.active,
        "flops": 6 * counts.active * job.tokens,
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "memory_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else 0,
        "torch": torch.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _curve(rows: list[dict], name: str) -> list[float]:
    return [_number(row[name]) for row in rows]


def _plain(value: Any) -> Any:
    """JSON values with numbers of five digits; what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> Any:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else json.loads(f"{value:.5g}")
