"""Whether this machine can train a configuration: one line a check, with what to do if not."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from k3_core.model import K3ForConditionalGeneration
from k3_train.config import TrainConfig, load_train_config
from k3_train.data.sampler import Batch
from k3_train.data.token_file import token_files
from k3_train.loop.build import build_trainer, choose_device, model_config
from k3_train.loop.corpus import open_sampler, open_tokenizer
from k3_train.loop.environment import versions
from k3_train.tools.inspect import inspect_config

TINY_TOKENS = 64


@dataclass(frozen=True)
class Check:
    """One line. is_fine: False makes the command fail."""

    name: str
    is_fine: bool
    text: str


def examine(config: TrainConfig, out: Path) -> Iterator[Check]:
    """All checks in order; what one raises is its result, and the next one follows."""
    checks: dict[str, Callable[[TrainConfig, Path], str]] = {
        "versions": _versions,
        "device": _device,
        "implementations": _implementations,
        "step": _step,
        "disk": _disk,
        "data": _data,
    }
    for name, check in checks.items():
        try:
            yield Check(name, True, check(config, out))
        except Exception as error:  # whatever a broken installation raises
            yield Check(name, False, f"{type(error).__name__}: {error}")


def _versions(config: TrainConfig, out: Path) -> str:
    return ", ".join(f"{name} {version or 'absent'}" for name, version in versions().items())


def _device(config: TrainConfig, out: Path) -> str:
    device = choose_device(config.run.device)
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    free, total = (value / 2**30 for value in torch.cuda.mem_get_info(device))
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    name = torch.cuda.get_device_name(device)
    return f"{name}, capability {capability}, {free:.1f} of {total:.1f} GiB free"


def _implementations(config: TrainConfig, out: Path) -> str:
    device = choose_device(config.run.device)
    model = K3ForConditionalGeneration(
        model_config(config.model),
        device="meta",
        ops_device=device,
        impl_overrides=config.impl,
        initialize=False,
    )
    if device.type == "cuda":
        model.bind_ops("cuda", "bfloat16")
    return ", ".join(sorted(one.chosen.name for one in model.resolutions.values()))


class _Random:
    """One packed batch of random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def batch(self, step: int, micro: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, self.vocab_size, (TINY_TOKENS + 1,), generator=generator)
        return Batch(ids[:-1], ids[1:], (TINY_TOKENS // 4, TINY_TOKENS - TINY_TOKENS // 4))


def _step(config: TrainConfig, out: Path) -> str:
    """Two steps of k3-test: the implementations compile in the first."""
    tiny = load_train_config(preset="k3-test", overrides=[f"run.device='{config.run.device}'"])
    vocab_size = model_config(tiny.model).text.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(tiny, _Random(vocab_size), Path(folder))
        trainer.state.model.train()
        seconds = []
        for step in range(2):
            started = time.perf_counter()
            metrics, norm = trainer.stepper.step([trainer.sampler.batch(step)], 1.0)
            loss = float(metrics["loss"]) + 0 * float(norm)
            seconds.append(time.perf_counter() - started)
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss of a step of k3-test is {loss}")
    return f"k3-test, loss {loss:.3f}; {seconds[0]:.2f} s the first, {seconds[1]:.3f} s the second"


def _disk(config: TrainConfig, out: Path) -> str:
    state = inspect_config(config).state_bytes
    one = sum(state.values()) - state["gradients"]
    needed = one * (config.run.keep_checkpoints + 1)
    folder = next(path for path in (out.resolve(), *out.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    text = (
        f"{free / 2**30:.1f} GiB free in {folder}; {config.run.keep_checkpoints} checkpoints and "
        f"the next take {needed / 2**30:.1f} GiB"
    )
    if free < needed:
        raise OSError(f"{text}: make room, or set run.keep_checkpoints lower")
    return text


def _data(config: TrainConfig, out: Path) -> str:
    if not config.data.path:
        return "none given: a run builds a small corpus in its folder"
    folder = Path(config.data.path)
    open_tokenizer(folder, model_config(config.model).text.vocab_size)
    open_sampler(config, folder)
    files = token_files(folder).values()
    for file in files:
        file.verify()
    tokens = sum(file.num_tokens for file in files)
    return f"{len(files)} token files with {tokens:,} tokens are what their manifests say"
