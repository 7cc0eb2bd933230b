"""From an arm to a run: the configurations of model and training, and what identifies the run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_core.config import ConfigError, K3Config
from k3_core.config.presets import hybrid_pattern
from k3_core.config.text import LinearAttnConfig, TextConfig
from k3_core.errors import K3Error, nearest
from k3_core.plugins import resolve
from k3_train.config import TrainConfig, load_train_config
from k3_train.loop.build import choose_device
from k3_train.study.declare import Arm, Scale

BASE = "k3-test"
"""Preset whose fields a scale does not mention."""
RATES = ("optim.muon_lr", "optim.adamw_lr", "optim.embedding_lr")
ROWS = 40
"""Rows of run.jsonl in a run, about; snapshots are a quarter of it apart."""
_KDA = {"kda_heads": "num_heads", "kda_head_dim": "head_dim"}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Job:
    """One run: `phase` is "search" (it only chooses the rate) or "full"."""

    arm: str
    phase: str
    rate: float
    seed: int
    tokens: int
    digest: str

    @property
    def key(self) -> tuple[str, str, float, int, str]:
        """What a finished run is found by."""
        return self.arm, self.phase, self.rate, self.seed, self.digest


def job_of(arm: Arm, scale: Scale, phase: str, rate: float, seed: int) -> Job:
    """The run of an arm at a rate; its digest covers every setting that the study states."""
    tokens = round(arm.tokens * (scale.tokens if phase == "full" else scale.search_tokens))
    stated = {
        "model": _model_fields(arm, scale),
        "set": _settings(arm, scale),
        "tokens": tokens,
        "data": data_key(scale),
        "measured": [scale.eval_tokens, scale.prefill_tokens],
    }
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:12]
    return Job(arm.name, phase, rate, seed, tokens, digest)


def data_key(scale: Scale) -> list[float]:
    """What the corpus depends on."""
    return [scale.vocab_size, scale.corpus_files, scale.recall_share, scale.recall_pairs]


def model_config(arm: Arm, scale: Scale) -> K3Config:
    """The model of an arm; ConfigError names an unknown or impossible field."""
    fields = _model_fields(arm, scale)
    base: dict[str, Any] = K3Config.preset(BASE).to_dict()
    text: dict[str, Any] = base["text_config"]
    linear: dict[str, Any] = text["linear_attn_config"]
    known = {*TextConfig.__dataclass_fields__, *_KDA, "kda_per_mla"}
    for name in fields:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(f"{arm.name}: model.{name}", "unknown field", f"Perhaps {near!r}.")
    ratio = int(fields.pop("kda_per_mla", 3))
    linear |= {_KDA[name]: fields.pop(name) for name in _KDA if name in fields}
    text |= {name: None if value == "none" else value for name, value in fields.items()}
    shift = scale.vocab_size - text["vocab_size"]
    text["vocab_size"] = scale.vocab_size
    for table in (text, base):
        table |= {name: table[name] + shift for name in _IDS}
    base["media_placeholder_token_id"] += shift
    linear |= hybrid_pattern(text["num_hidden_layers"], ratio + 1)
    text["linear_attn_config"] = LinearAttnConfig.from_dict(linear).to_dict()
    return K3Config.from_dict(base)


def train_config(arm: Arm, scale: Scale, job: Job, data: Path, folder: Path) -> TrainConfig:
    """The settings of a run in `folder`, which gets the config.json of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(model_config(arm, scale).to_dict(), indent=1), encoding="utf-8")
    return _train_config(arm, scale, job, {"data.path": str(data), "model.config": str(file)})


def check_arm(arm: Arm, scale: Scale) -> None:
    """Raise K3Error, naming the arm and what is missing, if a run of it could not begin."""
    try:
        model_config(arm, scale)
        config = _train_config(arm, scale, job_of(arm, scale, "full", 1.0, 0), {})
        choose_device(config.run.device)
        resolve("optimizer", config.optim.name, overrides=config.impl)
        resolve("schedule", config.schedule.name, overrides=config.impl)
        resolve("balancer", config.balance.name, overrides=config.impl)
        for name in config.run.events:
            resolve("trainer_event", name, overrides=config.impl)
    except K3Error as error:
        raise K3Error(f"arm {arm.name} of this study cannot run: {error}") from error


def _train_config(arm: Arm, scale: Scale, job: Job, paths: Mapping[str, str]) -> TrainConfig:
    values = _settings(arm, scale)
    defaults = load_train_config(overrides=[_override(*item) for item in values.items()])
    step_tokens = defaults.data.tokens_per_batch * defaults.run.accumulation
    steps = max(1, math.ceil(job.tokens / step_tokens))
    rows = max(1, steps // ROWS)
    values |= {
        **{name: getattr(defaults.optim, name.partition(".")[2]) * job.rate for name in RATES},
        **paths,
        "run.seed": job.seed,
        "run.steps": steps,
        "schedule.total_steps": steps,
        "run.log_every": rows,
        "diagnostics.every": max(1, steps // (4 * rows)),
        "run.checkpoint_every": 10**9,
    }
    return load_train_config(overrides=[_override(*item) for item in values.items()])


def _model_fields(arm: Arm, scale: Scale) -> dict[str, Any]:
    return {**scale.model, **arm.model, **arm.at.get(scale.name, {})}


def _settings(arm: Arm, scale: Scale) -> dict[str, Any]:
    return {**scale.set, **arm.set}


def _override(name: str, value: object) -> str:
    # Numbers, booleans, strings and lists are spelled alike in JSON and in TOML.
    return f"{name}={json.dumps(value, ensure_ascii=False)}"
