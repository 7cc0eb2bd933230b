"""The configuration of a training run: frozen dataclasses, read from TOML and `--set a.b=c`.

Order: the defaults here, the training preset of the model (`presets/NAME.toml`), `--config` (after
the file that it extends), `--set`. What was finally used is written to `config.resolved.toml` of
the run. No value here is the report's unless said so: peak rates, batch and horizon are not
disclosed (report 12).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from k3_core.config import ConfigError, apply_overrides, load_dataclass, read_toml

DEFAULT_HORIZON = 1000
"""Schedule horizon, in steps, of a run by `--steps` whose settings name no length."""


@dataclass(frozen=True)
class ModelSection:
    """What is trained.

    preset: name of a model preset; config: path of a config.json, instead of the preset.
    init_from: folder of a model to start from (weights only); empty for a fresh one.
    mtp_weight: weight of the MTP loss, when the model has an MTP layer (our own choice).
    """

    preset: str = "k3-test"
    config: str = ""
    init_from: str = ""
    mtp_weight: float = 0.2


@dataclass(frozen=True)
class DataSection:
    """Where the tokens come from and how they are packed.

    path: folder of token files; empty builds the default corpus in the run's folder.
    weights: share of the tokens by name of token file; empty goes by their sizes.
    tokens_per_batch: of one micro-batch. max_seq_len: longest piece of a document, in tokens.
    long_tokens: from how many tokens on a document is long; 0: none is.
    long_repeats: how often long documents come in an epoch.
    """

    path: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    tokens_per_batch: int = 2048
    max_seq_len: int = 512
    long_tokens: int = 0
    long_repeats: int = 1


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer by registry name, with peak learning rates by role.

    name: per_head_muon, muon or adamw, or a plugin's.
    muon_lr: of matrices under Muon. adamw_lr: of what AdamW updates.
    embedding_lr: of the embedding and the output head.
    weight_decay: of the roles that decay; 0.1 is the report's.
    momentum: Muon's. newton_schulz_steps: iterations of an orthogonalisation.
    muon_scale: how Muon's update follows the shape of its block: match_rms_adamw, 0.2 sqrt(larger
    side), or original, sqrt(rows / columns) where that is above 1.
    beta1, beta2: AdamW's moving means. eps: AdamW's.
    clip_norm: global gradient norm; 0 turns clipping off.
    qk_clip_tau: largest attention score before a head's weights are scaled down (K2's value; K3's
    is not disclosed); 0 turns QK-Clip off.
    """

    name: str = "per_head_muon"
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    embedding_lr: float = 0.01
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    qk_clip_tau: float = 100.0


@dataclass(frozen=True)
class ScheduleSection:
    """Schedule by registry name: cosine, wsd or constant; 1 % warm-up is the report's.

    name: cosine, wsd or constant, or a plugin's. warmup_ratio: share of the horizon.
    total_steps: the horizon; 0 means the planned steps of a run given in minutes, else `run.steps`,
    or `DEFAULT_HORIZON` when that is 0 too. The learning rate stays at its floor after it.
    min_lr_ratio: the floor of cosine and wsd. decay_ratio: the share of the horizon in which wsd
    decays.
    """

    name: str = "cosine"
    total_steps: int = 0
    warmup_ratio: float = 0.01
    min_lr_ratio: float = 0.1
    decay_ratio: float = 0.2


@dataclass(frozen=True)
class BalanceSection:
    """Balancer by registry name, with the settings that some of them have.

    name: quantile_histogram, quantile_exact, sign, auxiliary, none, or a plugin's.
    num_bins: of quantile_histogram (1000 is the report's).
    ema: share of the old biases that the quantile balancers keep; the report has none.
    sign_rate: how far `sign` moves a bias in a step (DeepSeek-V3's).
    auxiliary_weight: of the loss that `auxiliary` adds (Switch Transformer's).
    """

    name: str = "quantile_histogram"
    num_bins: int = 1000
    ema: float = 0.0
    sign_rate: float = 1e-3
    auxiliary_weight: float = 0.01


@dataclass(frozen=True)
class DiagnosticsSection:
    """Snapshots of the event "diagnostics".

    every: rows from one to the next. tokens: of the probe, a fixed batch that is looked into.
    """

    every: int = 5
    tokens: int = 256


@dataclass(frozen=True)
class EvaluateSection:
    """Suites of the event "evaluate" (`run.events`).

    suites: by registry name. every: rows from one evaluation to the next.
    seed: of what the suites draw. limit: documents, questions or items; 0 for each suite's own.
    efforts: of suites in the chat format.
    options: of the suites, a table each.
    """

    suites: tuple[str, ...] = ("text",)
    every: int = 10
    seed: int = 0
    limit: int = 0
    efforts: tuple[str, ...] = ("low",)
    options: dict[str, dict[str, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSection:
    """How the run goes.

    steps: optimizer steps to reach, in all; a run given in minutes sets it after measuring.
    seed: of the initial weights and of the order of the data.
    accumulation: micro-batches of one step. device: cpu, cuda or auto.
    threads: of the CPU's kernels; 0 leaves torch's number.
    log_every, checkpoint_every: in steps; both also at the end.
    keep_checkpoints: the newest ones kept.
    events, loggers: by registry name, in the order in which they are told.
    """

    steps: int = 0
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    accumulation: int = 1
    log_every: int = 10
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    events: tuple[str, ...] = ("diagnostics",)
    loggers: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuardSection:
    """What happens at a bad step, before its update is made.

    nonfinite: at a loss or gradient norm that is NaN or infinite: stop, skip (the step, not the
    run), or off, which leaves it to the next row to stop.
    spike: at a loss or gradient norm of more than `spike_factor` times its moving mean: off, note,
    skip or stop.
    spike_factor: how many times the moving mean is a spike.
    ema: how much of the moving means stays from one step to the next.
    warmup_steps: steps before anything counts as a spike.
    max_skips: a run stops when more steps than this are skipped in a row.
    """

    nonfinite: Literal["stop", "skip", "off"] = "stop"
    spike: Literal["off", "note", "skip", "stop"] = "note"
    spike_factor: float = 10.0
    ema: float = 0.98
    warmup_steps: int = 50
    max_skips: int = 10


@dataclass(frozen=True)
class LogSection:
    """What loggers that keep several runs call this one.

    project: what the run belongs to. name: of the run; empty takes that of its folder.
    """

    project: str = "k3"
    name: str = ""


_BELOW_ONE = 0.999999
RANGES: dict[str, tuple[float, float]] = {
    "model.mtp_weight": (0, math.inf),
    "data.tokens_per_batch": (2, math.inf),
    "data.max_seq_len": (2, math.inf),
    "data.long_tokens": (0, math.inf),
    "data.long_repeats": (1, math.inf),
    "optim.muon_lr": (0, math.inf),
    "optim.adamw_lr": (0, math.inf),
    "optim.embedding_lr": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.momentum": (0, _BELOW_ONE),
    "optim.newton_schulz_steps": (1, math.inf),
    "optim.beta1": (0, _BELOW_ONE),
    "optim.beta2": (0, _BELOW_ONE),
    "optim.eps": (0, math.inf),
    "optim.clip_norm": (0, math.inf),
    "optim.qk_clip_tau": (0, math.inf),
    "schedule.total_steps": (0, math.inf),
    "schedule.warmup_ratio": (0, 1),
    "schedule.min_lr_ratio": (0, 1),
    "schedule.decay_ratio": (0, 1),
    "balance.num_bins": (1, math.inf),
    "diagnostics.every": (1, math.inf),
    "diagnostics.tokens": (1, math.inf),
    "evaluate.every": (1, math.inf),
    "evaluate.limit": (0, math.inf),
    "balance.ema": (0, _BELOW_ONE),
    "balance.sign_rate": (0, math.inf),
    "balance.auxiliary_weight": (0, math.inf),
    "guard.spike_factor": (1, math.inf),
    "guard.ema": (0, _BELOW_ONE),
    "guard.warmup_steps": (0, math.inf),
    "guard.max_skips": (0, math.inf),
    "run.steps": (0, math.inf),
    "run.threads": (0, math.inf),
    "run.accumulation": (1, math.inf),
    "run.log_every": (1, math.inf),
    "run.checkpoint_every": (1, math.inf),
    "run.keep_checkpoints": (1, math.inf),
}
"""Smallest and largest value of each number."""


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum, `[[curriculum]]`; a value that is 0 or empty is that of the run.

    name: of the stage, for the log.
    steps: its length in optimizer steps; the last stage may leave it out and goes on to the end.
    tokens: its length in tokens instead of steps, rounded up to whole steps.
    max_seq_len: longest piece of a document; the longest of all stages is a multiple of each.
    tokens_per_batch: of one micro-batch.
    accumulation: micro-batches of one step.
    lr_scale: multiplies the rate of the schedule.
    weights: share of the tokens by name of token file.
    """

    name: str
    steps: int = 0
    tokens: int = 0
    max_seq_len: int = 0
    tokens_per_batch: int = 0
    accumulation: int = 0
    lr_scale: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run.

    memory: policies by patterns of modules and ops (`k3_train.memory.patterns`).
    impl: implementations by name.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    balance: BalanceSection = field(default_factory=BalanceSection)
    diagnostics: DiagnosticsSection = field(default_factory=DiagnosticsSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    guard: GuardSection = field(default_factory=GuardSection)
    run: RunSection = field(default_factory=RunSection)
    log: LogSection = field(default_factory=LogSection)
    curriculum: tuple[Stage, ...] = ()
    memory: dict[str, object] = field(default_factory=dict)
    impl: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            section, key = name.split(".")
            value = getattr(getattr(self, section), key)
            if not low <= value <= high:
                allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise ConfigError(name, f"{value} is out of range", f"Give {allowed}.")


def load_train_config(
    *, preset: str | None = None, file: Path | None = None, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Defaults, then the training preset of the model, then `file`, then `a.b=c` overrides.

    `preset` names the model and wins over the file. Raises ConfigError naming the bad key.
    """
    given = apply_overrides(read_extended(file) if file else {}, overrides)
    if preset is not None:
        given = apply_overrides(given, [f"model.preset={json.dumps(preset)}"])
    model = load_dataclass(ModelSection, _table(given, "model"), "model")
    shipped = Path(__file__).parent / "presets" / f"{model.preset}.toml"
    defaults = read_toml(shipped) if shipped.is_file() else {}
    return load_dataclass(TrainConfig, merge_sections(defaults, given))


def read_extended(file: Path, seen: tuple[Path, ...] = ()) -> dict[str, object]:
    """The tables of a TOML file over those of the file that its `extends` names, and so on.

    `extends` is a path from the folder of the file that has it. ConfigError for a circle.
    """
    file = file.resolve()
    if file in seen:
        chain = " -> ".join(str(one) for one in (*seen[seen.index(file) :], file))
        raise ConfigError("extends", f"the files extend each other: {chain}", "Break the circle.")
    own = read_toml(file)
    base = own.pop("extends", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ConfigError("extends", f"{base!r} in {file} is not a path", "Name one TOML file.")
    return merge_sections(read_extended(file.parent / base, (*seen, file)), own)


def merge_sections(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`base` with the keys of every table of `over`; what is inside a key is replaced whole."""
    merged: dict[str, object] = {}
    for name in {**base, **over}:
        if name == "curriculum":
            merged[name] = over.get(name, base.get(name))
        else:
            merged[name] = {**_table(base, name), **_table(over, name)}
    return merged


def _table(values: Mapping[str, object], name: str) -> dict[str, object]:
    table = values.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(name, f"{table!r} is not a table", f"Write its keys under [{name}].")
    return dict(table)


def write_toml(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration, one table per section, readable by `tomllib`."""
    lines = ["# The configuration that this run used; `k3 train resume` reads it."]
    for section, values in asdict(config).items():
        tables = [values] if isinstance(values, dict) else values
        for table in tables:
            lines += ["", f"[{section}]" if table is values else f"[[{section}]]"]
            lines += [f"{json.dumps(key)} = {_toml_value(value)}" for key, value in table.items()]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
        )
    # Numbers, booleans and strings of plain Unicode are spelled alike in JSON and in TOML.
    return json.dumps(value, ensure_ascii=False)
