"""Training on the chosen ops beside training on k3-core's references, with the same seeds.

    python benchmarks/train_agreement.py seeds --data DIR --device cpu --steps 500 --seed 0 1 2
    python benchmarks/train_agreement.py first --data DIR --device cuda --steps 20

`seeds` trains each seed twice, on the chosen implementations and on the references of all ops, and
prints the validation losses, the mean difference and the standard error over the seeds. `first`
takes both through the first steps from one checkpoint and prints loss and gradient norm of each.
DIR is a folder of token files (`k3 train data build`); validation batches are those of steps that
no run reaches.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from k3_core.model.batch import SequenceBatch
from k3_train.config import load_train_config
from k3_train.loop.build import build_schedule, build_trainer
from k3_train.loop.corpus import open_sampler
from k3_train.loop.trainer import Trainer
from k3_train.precision import training_precision

FIRST_VALIDATION = 1_000_000
"""Step whose batch is the first of the validation set."""
IMPLS: dict[str, list[str]] = {"chosen": [], "reference": ["impl.kernel='reference'"]}


def make(args: argparse.Namespace, impl: str, seed: int) -> tuple[Trainer, Any]:
    """A trainer at step 0 and its schedule."""
    overrides = [
        f"model.preset='{args.model}'",
        f"data.tokens_per_batch={args.tokens}",
        f"data.max_seq_len={args.length}",
        "data.weights={}",
        f"run.device='{args.device}'",
        f"run.threads={args.threads}",
        f"run.seed={seed}",
        f"schedule.total_steps={args.steps}",
        *IMPLS[impl],
    ]
    config = load_train_config(overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, open_sampler(config, Path(args.data)), Path(folder))
    trainer.state.model.train()
    return trainer, build_schedule(config)


def steps(trainer: Trainer, schedule: Any, count: int) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each of the next steps."""
    for _ in range(count):
        step = trainer.state.step
        metrics, norm = trainer.stepper.step([trainer.sampler.batch(step)], schedule.factor(step))
        yield float(metrics["loss"]), float(norm)


def validation_loss(trainer: Trainer, num_batches: int) -> float:
    """Mean loss of the next token over batches that no step trains on."""
    stepper, losses = trainer.stepper, []
    model = trainer.state.model.eval()
    with torch.no_grad(), training_precision(stepper.device):
        for index in range(num_batches):
            batch = trainer.sampler.batch(FIRST_VALIDATION + index)
            packed = SequenceBatch.from_lengths(batch.seqlens, device=stepper.device)
            ids, labels = stepper._to_device(batch.input_ids), stepper._to_device(batch.labels)
            losses.append(float(model.training_loss(ids, labels, packed, mtp_weight=0.0)[0]))
    return statistics.fmean(losses)


def seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Validation losses by implementation and seed, and whether their means agree."""
    losses: dict[str, list[float]] = {impl: [] for impl in args.impl}
    for seed in args.seed:
        for impl in args.impl:
            begin = time.perf_counter()
            trainer, schedule = make(args, impl, seed)
            for _ in steps(trainer, schedule, args.steps):
                pass
            losses[impl].append(validation_loss(trainer, args.validation))
            seconds = time.perf_counter() - begin
            print(f"{impl} seed {seed}: {losses[impl][-1]:.4f} in {seconds:.0f} s", flush=True)
    return {"losses": losses}


def agreement(losses: dict[str, list[float]]) -> dict[str, float]:
    """The difference of the means, and the standard error of a mean over the seeds."""
    ours, exact = losses["chosen"], losses["reference"]
    spread = statistics.fmean([statistics.variance(ours), statistics.variance(exact)]) ** 0.5
    return {
        "difference": statistics.fmean(ours) - statistics.fmean(exact),
        "standard_error": spread / len(ours) ** 0.5,
    }


def first(args: argparse.Namespace) -> dict[str, Any]:
    """Losses and norms of the first steps from one checkpoint, and the largest deviations."""
    ours, schedule = make(args, "chosen", args.seed[0])
    exact, _ = make(args, "reference", args.seed[0])
    for _ in steps(ours, schedule, args.warmup):
        pass
    exact.state.restore(*ours.state.snapshot())
    pairs = list(
        zip(steps(ours, schedule, args.steps), steps(exact, schedule, args.steps), strict=True)
    )
    for number, ((loss, norm), (loss_exact, norm_exact)) in enumerate(pairs):
        print(f"step {number}: loss {loss:.5f} {loss_exact:.5f}, norm {norm:.5f} {norm_exact:.5f}")
    worst = [max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in (0, 1)]
    print(f"largest deviation: loss {worst[0]:.2%}, gradient norm {worst[1]:.2%}")
    return {"steps": pairs, "loss": worst[0], "norm": worst[1]}


def main() -> None:
    """Run one of the two comparisons and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("seeds", "first"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="k3-nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=20, help="steps before the checkpoint")
    parser.add_argument("--validation", type=int, default=32, help="batches")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--impl", nargs="+", choices=tuple(IMPLS), default=list(IMPLS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = seeds(args) if args.what == "seeds" else first(args)
    if args.what == "seeds" and set(args.impl) == set(IMPLS) and len(args.seed) > 1:
        result |= agreement(result["losses"])
        print({name: result[name] for name in ("difference", "standard_error")})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
