"""What the guard and the saves beside the training cost, on random tokens.

    python benchmarks/trainer_saves.py --preset k3-mini --device cuda --tokens 16384 --length 2048

Three runs of the same steps: without the guard, with it, and saved every ten steps. Printed are the
median step of each, the slowest step (where the state is copied), and the seconds to read the
checkpoint back, its hashes compared. Ratios are against the first run.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from k3_train.config import load_train_config
from k3_train.data.sampler import Batch
from k3_train.events.base import TrainerEvent
from k3_train.loop.build import build_schedule, build_trainer, model_config
from k3_train.loop.progress import make_reporter
from k3_train.loop.trainer import Trainer

OFF = ("guard.nonfinite=off", "guard.spike=off")
RUNS = {"no guard": (*OFF, "run.checkpoint_every=100000"),
        "guard": ("run.checkpoint_every=100000",),
        "guard, saved every 10": ("run.checkpoint_every=10",)}  # fmt: skip
WARMUP = 5


class RandomTokens:
    """Pieces of `length` random tokens."""

    def __init__(self, vocab_size: int, tokens: int, length: int) -> None:
        self.vocab_size, self.lengths = vocab_size, (length,) * (tokens // length)

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Random tokens of the step."""
        generator = torch.Generator().manual_seed(step)
        total = sum(self.lengths)
        ids = torch.randint(0, self.vocab_size, (total + 1,), generator=generator)
        return Batch(ids[:-1], ids[1:], self.lengths)


class Clock(TrainerEvent):
    """Seconds from step to step, with the device's work: it waits for it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Another step is done."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def measure(args: argparse.Namespace, settings: tuple[str, ...]) -> tuple[list[float], str]:
    """Seconds of the steps after the warm-up, and what reading the checkpoint took."""
    overrides = [f"run.device='{args.device}'", "schedule.total_steps=1000", *settings]
    config = load_train_config(preset=args.preset, overrides=[*overrides, "run.keep_checkpoints=1"])
    sampler = RandomTokens(model_config(config.model).text.vocab_size, args.tokens, args.length)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = build_trainer(config, sampler, Path(folder))
        clock = trainer.events.by_name["clock"] = Clock()
        trainer.run(args.steps, build_schedule(config), make_reporter(args.steps, io.StringIO()))
        start = time.perf_counter()
        trainer.resume()
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / 2**30
    return clock.seconds[WARMUP:], f"{size:.2f} GiB read in {seconds:.1f} s"


def main() -> None:
    """Measure the three runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="k3-test")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--folder", default=None, help="where checkpoints are written")
    args = parser.parse_args()
    print(torch.__version__, args.preset, args.device, f"{args.tokens} tokens a step", flush=True)
    first = 0.0
    for name, settings in RUNS.items():
        seconds, read = measure(args, settings)
        median = statistics.median(seconds)
        first = first or median
        print(
            f"{name:<22} median {1e3 * median:8.1f} ms ({median / first:.3f}x), mean "
            f"{1e3 * statistics.mean(seconds):8.1f} ms, slowest {1e3 * max(seconds):.1f}; {read}",
            flush=True,
        )


if __name__ == "__main__":
    main()
