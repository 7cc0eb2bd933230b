"""From a configuration to a trainer: model, optimizer, balancer, sampler, by the registry."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_core.checkpoint.source import resolve_source
from k3_core.config import ConfigError, K3Config, count_parameters
from k3_core.model import K3ForConditionalGeneration
from k3_core.plugins import resolve
from k3_train.balance.base import Balancer, routers_of
from k3_train.balance.load import LoadTracker
from k3_train.config import ModelSection, TrainConfig
from k3_train.events.base import Events, TrainerEvent
from k3_train.loop.curriculum import Curriculum, StagedSchedule
from k3_train.loop.state import TrainState
from k3_train.loop.step import Stepper
from k3_train.loop.trainer import Sampler, Schedule, Trainer
from k3_train.memory.apply import apply_memory
from k3_train.memory.scope import Scopes
from k3_train.memory.unused import UnusedEntries

_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def choose_device(name: str) -> torch.device:
    """cpu, cuda, cuda:N, or auto: cuda when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device", f"{name!r}, but no GPU is usable", "Use cpu or auto.")
    return device


def peak_flops(device: torch.device) -> float:
    """Dense bf16 FLOP/s of a GPU by its data sheet; infinite where it is not known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), math.inf)


def model_config(section: ModelSection) -> K3Config:
    """The configuration of the model to train."""
    if section.init_from:
        return K3Config.from_file(resolve_source(section.init_from))
    if section.config:
        return K3Config.from_file(Path(section.config))
    return K3Config.preset(section.preset)


def build_trainer(config: TrainConfig, sampler: Sampler, folder: Path) -> Trainer:
    """Everything of a run at step 0; the seed of the configuration makes it repeatable."""
    device = choose_device(config.run.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    model = _model(config, device)
    memory = apply_memory(model, config.memory, config.impl)
    routers = routers_of(model)
    text = model.config.text
    balancer = _balancer(config, routers, text.num_experts_per_token)
    loads = LoadTracker(len(routers), text.num_experts, device)
    _observe(routers, balancer, loads)
    optimizer: Any = _load("optimizer", config.optim.name, device, config)(
        dict(model.named_parameters()),
        text=text,
        optim=config.optim,
        newton_schulz=_load("kernel", "newton_schulz", device, config),
    )
    stepper = Stepper(
        TrainState(model, optimizer, balancer, events=_events(config, memory, sampler)),
        device=device,
        clip_norm=config.optim.clip_norm,
        mtp_weight=config.model.mtp_weight if text.num_nextn_predict_layers else 0.0,
    )
    return Trainer(
        stepper,
        sampler,
        loads,
        run=config.run,
        peak_lr=config.optim.muon_lr,
        folder=folder,
        num_micro=Curriculum(config).num_micro,
        mfu_per_token=6 * count_parameters(model.config).active / peak_flops(device),
    )


def build_schedule(config: TrainConfig) -> Schedule:
    """The schedule over the horizon of the configuration."""
    section = config.schedule
    target: Any = resolve("schedule", section.name, overrides=config.impl).load()
    schedule: Schedule = target(
        total_steps=section.total_steps,
        warmup_ratio=section.warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        decay_ratio=section.decay_ratio,
    )
    return StagedSchedule(schedule, Curriculum(config)) if config.curriculum else schedule


def _model(config: TrainConfig, device: torch.device) -> K3ForConditionalGeneration:
    section = config.model
    common: dict[str, Any] = {
        "device": device,
        "dtype": torch.float32,
        "impl_overrides": config.impl,
    }
    if section.init_from:
        model = K3ForConditionalGeneration.from_pretrained(
            section.init_from, experts="dequantized", **common
        )
    else:
        model = K3ForConditionalGeneration(model_config(section), **common)
    if device.type == "cuda":
        # Parameters are float32, but under autocast the ops see bfloat16.
        model.bind_ops("cuda", "bfloat16")
    return model


def _balancer(config: TrainConfig, routers: list[Any], top_k: int) -> Balancer:
    target: Any = resolve("balancer", config.balance.name, overrides=config.impl).load()
    biases = [router.e_score_correction_bias for router in routers]
    return target(biases, top_k=top_k, settings=config.balance)


def _observe(routers: list[Any], balancer: Balancer, loads: LoadTracker) -> None:
    histograms: Any = getattr(balancer, "histograms", None)
    auxiliary: Any = getattr(balancer, "auxiliary", None)
    for index, router in enumerate(routers):
        if auxiliary is not None:
            router.auxiliary = auxiliary
        is_counted_by_op = histograms is not None and hasattr(router, "histogram_EB")
        if is_counted_by_op:
            router.histogram_EB = histograms[index]

        def observer(
            routes: Any,
            is_counted_T: Tensor | None = None,
            index: int = index,
            is_counted_by_op: bool = is_counted_by_op,
        ) -> None:
            if not is_counted_by_op:
                balancer.observe(index, routes, is_counted_T)
            loads.observe(index, routes, is_counted_T)

        router.observer = observer


def _events(config: TrainConfig, memory: Scopes, sampler: Sampler) -> Events:
    is_guarded = (config.guard.nonfinite, config.guard.spike) != ("off", "off")
    # The guard comes first: what it skips, the others do not take for a step.
    own = {
        "guard": is_guarded,
        "qk_clip": bool(config.optim.qk_clip_tau),
        "stages": bool(config.curriculum),
        "tower_norms": getattr(sampler, "has_images", False),
    }
    wanted = tuple(name for name in own if own[name] and name not in config.run.events)
    chosen = {"trainer_event": wanted + config.run.events, "logger": config.run.loggers}
    events: dict[str, TrainerEvent] = {"memory": UnusedEntries(config, memory)}
    for kind, names in chosen.items():
        for name in names:
            target: Any = resolve(kind, name, overrides=config.impl).load()
            events[name] = target(config)
    return Events(events)


def _load(kind: str, implements: str, device: torch.device, config: TrainConfig) -> Any:
    return resolve(kind, implements, device=device.type, overrides=config.impl).load()
