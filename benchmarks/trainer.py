"""Steps of the trainer: tokens a second for batch sizes of a preset, and where the time goes.

    python benchmarks/trainer.py --preset k3-nano --device cuda --batch 32768 65536 --profile

The ratio printed is against the smallest batch of the same run.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from k3_train.config import load_train_config
from k3_train.loop.build import build_trainer
from k3_train.loop.corpus import open_sampler


def measure(args: argparse.Namespace, batch: int) -> float:
    """Tokens a second over `args.steps` steps, after a warm-up."""
    overrides = [f"data.tokens_per_batch={batch}", f"run.device='{args.device}'", *args.set]
    config = load_train_config(preset=args.preset, overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, open_sampler(config, Path(args.data)), Path(folder))
        trainer.state.model.train()
        seconds = trainer.measure_step_seconds(args.steps, num_warmup=3)
        if args.profile:
            profile(trainer, args.device)
    return batch / seconds


def profile(trainer: object, device: str) -> None:
    """The most expensive operators of two steps."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        trainer.measure_step_seconds(2, num_warmup=0)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def main() -> None:
    """Measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="k3-test")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", required=True, help="folder of token files")
    parser.add_argument("--batch", type=int, nargs="+", default=[2048])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    first = None
    for batch in args.batch:
        start = time.perf_counter()
        speed = measure(args, batch)
        first = first or speed
        print(
            f"{args.preset} {args.device} {batch} tokens a step: {speed:,.0f} tokens/s, "
            f"x{speed / first:.2f} (set-up included {time.perf_counter() - start:.1f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
