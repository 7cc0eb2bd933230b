"""One call of `k3 train fit` or `resume`: plan the steps, train, export (training 7).

A run folder holds config.resolved.toml, environment.json, run.jsonl, diagnostics.jsonl,
report.html, checkpoints/, model/ and, when no data was given, data/.
"""

import time
from dataclasses import replace
from pathlib import Path

from k3_core.config import ConfigError, K3Config
from k3_core.model import K3ForConditionalGeneration
from k3_core.tokenizer import K3Tokenizer
from k3_train.config import DEFAULT_HORIZON, TrainConfig, load_train_config, write_toml
from k3_train.loop.build import build_schedule, build_trainer, model_config
from k3_train.loop.corpus import build_default, check_pictures, open_sampler, open_tokenizer
from k3_train.loop.curriculum import Curriculum
from k3_train.loop.environment import write_environment
from k3_train.loop.progress import make_reporter
from k3_train.loop.trainer import Trainer
from k3_train.report.run_page import write_report

CONFIG_FILE = "config.resolved.toml"
RESERVED_SHARE = 0.1
"""Part of a run in minutes kept for checkpoints, the export and a pace that changes."""
RESERVED_SECONDS = 2.5
MEASURED_SHARE = 0.03
"""Part of a run in minutes spent on measuring the pace, after the warm-up."""


class Session:
    """A run folder with its trainer. `started` is a `time.perf_counter` value of the call."""

    def __init__(self, config: TrainConfig, folder: Path, *, started: float) -> None:
        self.config, self.folder, self.started = config, folder, started
        self.model_config: K3Config = model_config(config.model)
        vocab_size = self.model_config.text.vocab_size
        data = Path(config.data.path) if config.data.path else folder / "data"
        if not config.data.path:
            build_default(data, vocab_size)
        self.tokenizer = open_tokenizer(data, vocab_size)
        sampler = open_sampler(config, data)
        check_pictures(sampler, self.model_config.vision)
        self.trainer: Trainer = build_trainer(config, sampler, folder)

    def train(self, *, steps: int | None, minutes: float | None) -> str:
        """Take `steps` more steps, or what fits in `minutes`, or what `run.steps` still asks for.

        Returns the signal that stopped the run, empty when it reached its end and was exported.
        """
        done = self.trainer.state.step
        planned = self.config.run.steps or Curriculum(self.config).total_steps
        if minutes is not None:
            steps = self._steps_within(minutes)
        target = done + steps if steps is not None else planned
        horizon = self.config.schedule.total_steps
        if not horizon:
            horizon = target if minutes else planned or DEFAULT_HORIZON
        self.config = replace(
            self.config,
            run=replace(self.config.run, steps=target),
            schedule=replace(self.config.schedule, total_steps=horizon),
        )
        self._write_description()
        reporter = make_reporter(target)
        stopped = self.trainer.run(target, build_schedule(self.config), reporter)
        write_report(self.folder)
        if not stopped:
            self.export()
        return stopped

    def export(self) -> None:
        """Write the model with its tokenizer to `model/`, in the released layout.

        Experts are packed in place when the configuration says that they are quantised, so this
        ends the session; the checkpoints keep their float32 weights.
        """
        save_model(self.trainer.state.model.eval(), self.folder / "model", self.tokenizer)

    def _write_description(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_toml(self.config, self.folder / CONFIG_FILE)
        write_environment(
            self.folder / "environment.json",
            self.trainer.stepper.device,
            self.trainer.state.model.resolutions,
        )

    def _steps_within(self, minutes: float) -> int:
        """Fix the number of steps from measured ones; set-up and export are inside the limit."""
        if self.config.curriculum:
            raise ConfigError(
                "--minutes",
                "the stages of a curriculum take different times a step",
                "Give --steps, or lengths to all stages.",
            )
        rough = self.trainer.measure_step_seconds(1, num_warmup=2)
        num_steps = int(MEASURED_SHARE * 60 * minutes / rough)
        pace = self.trainer.measure_step_seconds(min(50, max(2, num_steps)))
        spent = time.perf_counter() - self.started
        left = 60 * minutes * (1 - RESERVED_SHARE) - RESERVED_SECONDS - spent
        if left < pace:
            raise ConfigError(
                "--minutes",
                f"{minutes} leaves no time for a step: {spent:.1f} s were spent, one takes "
                f"{pace:.2f} s",
                "Give more minutes, or --steps.",
            )
        return int(left / pace)


def save_model(model: K3ForConditionalGeneration, out: Path, tokenizer: K3Tokenizer) -> None:
    """Write a trained model in the released layout; its experts are packed in place if need be."""
    if model.config.text.quantization_config:
        model.pack_experts()
    model.save_pretrained(out, tokenizer=tokenizer)


def start(config: TrainConfig, folder: Path, *, started: float) -> Session:
    """A session at step 0; ConfigError when the folder already has a run."""
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(
            "--out",
            f"{folder} has a run already",
            f"Continue it with `k3 train resume {folder}`, or choose another folder.",
        )
    return Session(config, folder, started=started)


def reopen(folder: Path, *, overrides: list[str], started: float) -> Session:
    """A session at the newest checkpoint of a run folder, with its configuration."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(str(folder), f"no {CONFIG_FILE} in it", "Start with `k3 train fit`.")
    session = Session(load_train_config(file=path, overrides=overrides), folder, started=started)
    session.trainer.resume()
    return session
