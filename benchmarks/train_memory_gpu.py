"""Peak memory, step time and gradients of each memory policy, on a GPU.

    python benchmarks/train_memory_gpu.py --micro 16384 --out train_memory.json
    python benchmarks/train_memory_gpu.py --micro 65536 131072 --policies keep recompute all
    python benchmarks/train_memory_gpu.py --warmup 20 --steps 50 --seconds 600

One optimizer step (forward, backward, Per-Head Muon, balancing) of `--tokens` tokens in sequences
of `--length`, as micro-batches of `--micro`; the learning rate is 0, so that all policies see the
same weights. Step times are medians of `--steps` steps after `--warmup`, or of those that fit
`--seconds` and half of that; kernels are compiled before, for the gradients. MFU is 6 x active
parameters (unembedding counted) x tokens/s / 989 TFLOP/s. `cosine` is of the gradient of one
micro-batch (16,384 tokens at most) with the same one's without policies. `left_gb` is in use
between steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import kernels_timing as timing
import torch
from train_step_gpu import RandomTokens

from k3_core.config import count_parameters
from k3_train.config import load_train_config
from k3_train.data.sampler import Batch
from k3_train.loop.build import build_trainer
from k3_train.loop.trainer import Trainer
from k3_train.memory.apply import apply_memory

PEAK = 989e12
"""Products in bfloat16 a second that the maker of an H200 names."""
SUBLAYERS = {f"layers.*.{name}": "recompute" for name in ("self_attn", "mlp", "block_sparse_moe")}
POINTWISE = {
    f"op:{op}": "recompute"
    for op in ("rms_norm", "gated_rms_norm", "situ_glu", "short_conv", "depth_read", "attn_res")
}
POLICIES: dict[str, dict[str, object]] = {
    "keep": {},
    "recompute": dict(SUBLAYERS),
    "recompute_ops": dict(POINTWISE),
    "fp8": {"layers.*": "fp8"},
    "fp8_but_kda": {"layers.*": "fp8", "op:kda_chunk": "keep"},
    "offload": {"layers.*": "offload"},
    # The report's: elementwise work again, the rest in FP8 on the host; KDA's inputs stay.
    "all": {**POINTWISE, "layers.*": ["fp8", "offload"], "op:kda_chunk": "keep"},
    "recompute_offload": {**SUBLAYERS, "layers.*": "offload"},
}
GRADIENT_TOKENS = 16384
DEFAULT = ["keep", "recompute", "recompute_ops", "fp8", "offload", "all"]


def annotate(trainer: Trainer, table: dict[str, object]) -> None:
    """Replace the model's policies by those of a table."""
    model, device = trainer.state.model, trainer.stepper.device
    for module in model.modules():
        vars(module).pop("forward", None)
    model.bind_ops(device.type, "bfloat16" if device.type == "cuda" else "float32")
    apply_memory(model, table)


def clock(device: torch.device) -> Any:
    """What `elapsed_ms` takes two of; a GPU's is not waited for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Between two clocks, when the device is done."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_times(trainer: Trainer, batches: list[Batch], args: argparse.Namespace) -> list[float]:
    """Milliseconds of the steps after the warm-up, two at least."""
    device = trainer.stepper.device

    def take(most: int, seconds: float) -> list[Any]:
        started, marks = time.perf_counter(), [clock(device)]
        while len(marks) <= most and (len(marks) < 3 or time.perf_counter() - started < seconds):
            trainer.stepper.step(batches, 0.0)
            marks.append(clock(device))
            if len(marks) % 4 == 0:
                synchronize(device)  # so that the host's clock tells how long it takes
        synchronize(device)
        return marks

    take(args.warmup, args.seconds / 2)
    return [elapsed_ms(*pair) for pair in pairwise(take(args.steps, args.seconds))]


def gradient(trainer: Trainer) -> list[torch.Tensor]:
    """Of one micro-batch that fits without policies, by parameter."""
    sampler = trainer.sampler
    assert isinstance(sampler, RandomTokens)
    smaller = replace(sampler, num_tokens=min(sampler.num_tokens, GRADIENT_TOKENS))
    trainer.stepper.replay(smaller.batch(0))
    grads = [p.grad for p in trainer.stepper.params if p.grad is not None]
    for parameter in trainer.stepper.params:
        parameter.grad = None
    return grads


def cosine(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Of two gradients as a whole."""
    pairs = list(zip(left, right, strict=True))
    sums = [(float((a * b).sum()), float((a * a).sum()), float((b * b).sum())) for a, b in pairs]
    both, own, other = (sum(column) for column in zip(*sums, strict=True))
    return both / (own * other) ** 0.5


def gigabytes(device: torch.device, statistic: str) -> float:
    """A statistic of the device's memory, or of pinned memory by `host.<statistic>`."""
    if device.type != "cuda":
        return 0.0
    if statistic.startswith("host."):
        return torch.cuda.host_memory_stats().get(statistic.removeprefix("host."), 0) / 1e9
    return torch.cuda.memory_stats(device)[statistic] / 1e9


def measure(
    trainer: Trainer, name: str, micro: int, args: argparse.Namespace, active: int
) -> dict[str, Any]:
    """One row of the table."""
    device = trainer.stepper.device
    found = 1.0
    if not args.no_gradients:
        annotate(trainer, {})
        exact = gradient(trainer)
        annotate(trainer, POLICIES[name])
        found = cosine(gradient(trainer), exact)
        del exact
    annotate(trainer, POLICIES[name])
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    batches = [trainer.sampler.batch(0, i) for i in range(args.tokens // micro)]
    times = step_times(trainer, batches, args)
    ms = statistics.median(times)
    tokens = sum(len(batch.input_ids) for batch in batches)
    rate = tokens / ms * 1e3
    return {
        "tokens": tokens,
        "step_ms": ms,
        "spread_ms": [min(times), max(times)],
        "steps": len(times),
        "tokens_per_s": rate,
        "mfu": 6 * active * rate / PEAK,
        "peak_gb": gigabytes(device, "allocated_bytes.all.peak"),
        "reserved_gb": gigabytes(device, "reserved_bytes.all.peak"),
        "left_gb": gigabytes(device, "allocated_bytes.all.current"),
        "host_gb": gigabytes(device, "host.allocated_bytes.peak"),
        "cosine": found,
    }


def build(args: argparse.Namespace) -> Trainer:
    """A trainer whose micro-batches are set later."""
    overrides = [f"model.preset='{args.model}'", f"run.device='{args.device}'"]
    config = load_train_config(overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, RandomTokens(0, args.length, 0), Path(folder))
    trainer.state.model.train()
    return trainer


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="k3-mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=131072, help="of an optimizer step")
    parser.add_argument("--micro", type=int, nargs="+", default=[16384])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--policies", nargs="+", default=DEFAULT, choices=list(POLICIES))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=8.0, help="for a policy, at most")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure every policy at every size of micro-batches."""
    args = arguments()
    trainer = build(args)
    config = trainer.state.model.config
    active = count_parameters(config).active
    print(f"{active / 1e6:.1f}M active parameters", flush=True)
    record = timing.run_record() if args.device == "cuda" else {}
    rows: list[dict[str, Any]] = []
    for micro in args.micro:
        trainer.sampler = RandomTokens(micro, args.length, config.text.vocab_size)
        for name in args.policies:
            try:
                row = measure(trainer, name, micro, args, active)
            except torch.OutOfMemoryError:
                for parameter in trainer.stepper.params:
                    parameter.grad = None
                row = {"error": "out of memory"}
            rows.append({"policy": name, "micro": micro, **row})
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps({**record, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
