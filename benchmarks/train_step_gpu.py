"""One training step on a GPU: its parts, and each op's time beside its floor.

    python benchmarks/train_step_gpu.py --model k3-mini --out train_step.json

The step is the trainer's own (bfloat16 autocast over float32 parameters, Per-Head Muon, balancing)
on random tokens in sequences of `--length`. An op's row is its forward and backward alone, on the
arguments of its calls in the step, times the number of such calls. Its floor: every argument,
result and gradient once at this run's copy rate (weights of experts and the vocabulary included),
or its products at 761 TFLOP/s, whichever takes longer. What is left of the step is in the row
`rest`: projections that are no op of their own, elementwise calls, gaps between launches.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import kernels_timing as timing
import torch
from torch import Tensor

from k3_core.config import K3Config
from k3_core.model.batch import SequenceBatch
from k3_core.ops import OP_NAMES
from k3_train.config import load_train_config
from k3_train.data.sampler import Batch
from k3_train.loop.build import build_trainer
from k3_train.loop.trainer import Trainer
from k3_train.precision import training_precision

PEAK = 761e12
"""Products in bfloat16 a second on this card (kernels.md 3)."""


@dataclass
class RandomTokens:
    """A sampler of sequences of one length."""

    num_tokens: int
    length: int
    vocabulary: int

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Tokens that follow from the step."""
        generator = torch.Generator().manual_seed(1000 * step + micro)
        ids = torch.randint(0, self.vocabulary, (self.num_tokens + 1,), generator=generator)
        lengths = (self.length,) * (self.num_tokens // self.length)
        return Batch(input_ids=ids[:-1], labels=ids[1:], seqlens=lengths)


@dataclass
class Calls:
    """Calls of one op with arguments of the same shapes; the first one's arguments are kept."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    count: int = 0

    def run(self) -> None:
        """Forward and, where an argument needs it, backward."""
        results = [x for x in tensors(self.function(*self.args, **self.options)) if x.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
            for leaf in tensors((self.args, self.options)):
                leaf.grad = None


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def detached(value: Any) -> Any:
    """The same arguments as leaves of a graph of their own; parameters stay what they are."""
    if isinstance(value, Tensor):
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: detached(item) for name, item in value.items()}
    if isinstance(value, list):
        return [detached(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(detached(item) for item in value)
    return value


class Recorder:
    """Stands in for the ops of a model and keeps the arguments of their calls."""

    def __init__(self, ops: Any) -> None:
        self.calls: dict[Any, Calls] = {}
        self._ops = ops
        self._functions = {n: f for n in OP_NAMES if (f := vars(ops).get(n)) is not None}

    def __enter__(self) -> "Recorder":
        for name, function in self._functions.items():
            setattr(self._ops, name, self._recording(name, function))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, function in self._functions.items():
            setattr(self._ops, name, function)

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # The experts know their activation by its name.
        @wraps(function)
        def record(*args: Any, **options: Any) -> Any:
            given = list(tensors((args, options)))
            key = (name, *((tuple(x.shape), x.dtype, x.requires_grad) for x in given))
            if key not in self.calls:
                self.calls[key] = Calls(function, detached(args), detached(options))
            self.calls[key].count += 1
            return function(*args, **options)

        return record


def floor_us(name: str, calls: Calls, rate: float) -> float:
    """Time of the bytes and of the products of one call, forward and backward, the longer one."""
    given = list(tensors((calls.args, calls.options)))
    made = list(tensors(calls.function(*calls.args, **calls.options)))
    num_bytes = sum(x.nbytes for x in given) + sum(x.nbytes for x in made)
    if any(x.requires_grad for x in made):
        grads = sum(x.nbytes for x in given if x.requires_grad) + sum(x.nbytes for x in made)
        num_bytes += sum(x.nbytes for x in given) + grads
    return max(num_bytes / rate, flops(name, given) / PEAK) * 1e6


def flops(name: str, given: list[Tensor]) -> float:
    """Of the matrix products, forward and backward; 0 for ops without."""
    if name == "linear":
        return 6.0 * given[0].numel() * given[1].shape[0]
    if name == "linear_cross_entropy":
        return 6.0 * given[0].numel() * given[1].shape[0]
    if name == "moe_experts":
        rows, weights = given[1].numel(), given[3:6]
        return 6.0 * rows * sum(w.shape[1] * w.shape[2] for w in weights)
    if name == "mla_prefill":
        q, _, v, cu = given[:4]
        pairs = float(((cu.diff().double() ** 2) / 2).sum())
        return 2.0 * q.shape[1] * pairs * (4 * q.shape[2] + 3 * v.shape[2])
    return 0.0


def op_rows(trainer: Trainer, rate: float, repeats: int) -> list[dict[str, Any]]:
    """One row an op and set of shapes."""
    model = trainer.state.model
    batch = trainer.sampler.batch(0)
    with Recorder(model.ops) as recorder:
        trainer.stepper.replay(batch)
    rows = []
    for key, calls in recorder.calls.items():
        name = key[0]
        with training_precision(trainer.stepper.device):
            us = timing.event_us(calls.run, repeats)
            floor = floor_us(name, calls, rate)
        shapes = " ".join("x".join(map(str, shape)) for shape, _, _ in key[1:4])
        row = {"op": name, "shapes": shapes, "calls": calls.count, "us": us, "floor_us": floor}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["us"] * row["calls"])


def parts(trainer: Trainer, repeats: int) -> dict[str, float]:
    """Milliseconds of a step, of its forward and backward, and of the optimizer."""
    batch, stepper = trainer.sampler.batch(0), trainer.stepper
    ids, labels = stepper._to_device(batch.input_ids), stepper._to_device(batch.labels)
    packed = SequenceBatch.from_lengths(batch.seqlens, device=stepper.device)

    def forward() -> Tensor:
        with training_precision(stepper.device):
            return stepper.state.model.training_loss(
                ids, labels, packed, mtp_weight=stepper.mtp_weight
            )[0]

    both = timing.event_us(lambda: forward().backward(), repeats) / 1e3
    with torch.no_grad():
        alone = timing.event_us(forward, repeats) / 1e3
    update = timing.event_us(lambda: stepper.state.optimizer.step(0.0), repeats) / 1e3
    step = trainer.measure_step_seconds(repeats, num_warmup=2) * 1e3
    return {"step": step, "forward_backward": both, "forward_alone": alone, "optimizer": update}


def main() -> None:
    """Measure one step and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="k3-mini")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    overrides = [
        f"model.preset='{args.model}'",
        f"data.tokens_per_batch={args.tokens}",
        f"run.device='{args.device}'",
    ]
    config = load_train_config(overrides=overrides)
    vocabulary = K3Config.preset(args.model).text.vocab_size
    sampler = RandomTokens(args.tokens, args.length, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, sampler, Path(folder))
    trainer.state.model.train()
    rate = timing.copy_rate()
    times = parts(trainer, args.repeats)
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(times, f"peak {peak:.2f} GB", flush=True)
    rows = op_rows(trainer, rate, args.repeats)
    whole = times["forward_backward"]
    for row in rows:
        spent = row["us"] * row["calls"] / 1e3
        print(
            f"{row['op']:22s} {row['calls']:4d} x {row['us']:9.1f} us, {spent / whole:6.1%} of the "
            f"step, {row['us'] / row['floor_us']:6.2f} x its floor  {row['shapes']}",
            flush=True,
        )
    rest = whole - sum(row["us"] * row["calls"] for row in rows) / 1e3
    print(f"rest {rest:.2f} ms, {rest / whole:.1%}", flush=True)
    if args.out:
        record = {**timing.run_record(), "copy_rate": rate, "peak_gb": peak}
        record |= {"times_ms": times, "ops": rows, "rest_ms": rest}
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
