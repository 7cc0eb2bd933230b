"""Training of kda_chunk on a CUDA device: forward and backward beside the public figures.

    python benchmarks/kernels_kda_train.py --device cuda --out train.json    all rows, with stages
    python benchmarks/kernels_kda_train.py --device cuda --sweep             tiles of the backward
    TRITON_INTERPRET=1 python benchmarks/kernels_kda_train.py --device cpu   does it run? no times

Draws and gates as benchmarks/kernels_kda.py. Times are medians in microseconds: `event` of a
forward and backward between two events, `graph` of its replay as a graph; stages are those of one
slab, times the slabs. `peak` is the most memory allocated, in GB, inputs and gradients included.
`errors` are RMS error ratios of the gradients on two heads against float64.
Legend: T packed tokens, H heads, D = K = V.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import kernels_kda as kda
import kernels_timing as timing
import torch
from torch import Tensor

from k3_kernels.kda_chunk import backward
from k3_kernels.kda_chunk.backward_config import BackwardBlocks, choose_backward_blocks
from k3_kernels.kda_chunk.backward_launch import (
    keep_states,
    make_slab_tiles,
    run_chunks,
    run_reverse,
)
from k3_kernels.kda_chunk.config import PRECISIONS, choose_blocks
from k3_kernels.kda_chunk.forward import Call, Inputs, Saves

ROWS = (
    kda.Chunked("T=8192 H=96", (8192,), 96, (5320, 6050), (4500, 4500)),
    kda.Chunked("8x1024 H=96", (1024,) * 8, 96, (5750, 5810), (4500, 4500)),
    kda.Chunked("T=65536 H=24", (65536,), 24, (9860, 21700), (8500, 9500)),
)
NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state")
CHECKED = kda.Chunked("checked", (2048, 1, 0, 700), 4, (0, 0), (0, 0))


def leaves_of(inputs: kda.Inputs) -> list[Tensor]:
    """The seven inputs as leaves."""
    return [x.detach().requires_grad_() for x in inputs.args]


def step(leaves: list[Tensor], named: dict, d_o: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all inputs, states aside."""
    o, _ = kda.kda_chunk(*leaves, **named)
    return torch.autograd.grad(o, leaves, d_o)


def training(inputs: kda.Inputs) -> Callable[[], object]:
    """One forward and backward, without states."""
    named = {n: inputs.named[n] for n in ("lower_bound", "cu_seqlens_N1", "seqlens")}
    return partial(step, leaves_of(inputs), named, torch.randn_like(inputs.args[2]))


def peak_gb(call: Callable[[], object]) -> float:
    """Most memory allocated during a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e9


def errors(row: kda.Chunked, gate: str, dtype: torch.dtype, device: str, dim: int) -> dict:
    """RMS error ratios of o and of all gradients on two heads, states included."""
    inputs = kda.draw_chunked(row, gate, dtype, device, dim)
    leaves, named = leaves_of(inputs), dict(inputs.named)
    leaves.append(named.pop("initial_state_NHVK").requires_grad_())
    d_o, d_final = torch.randn_like(leaves[2]), torch.randn_like(leaves[7])
    few = [x[:, :2] for x in leaves[:5]] + [x[:2] for x in leaves[5:7]] + [leaves[7][:, :2]]
    exact = [x.detach().double().requires_grad_() for x in few]
    results = []
    for op, own, heads in ((kda.kda_chunk, leaves, slice(None)), (kda.oracle, exact, slice(2))):
        o, final = op(*own[:7], **named, initial_state_NHVK=own[7])
        loss = [d_o[:, heads].to(o.dtype), d_final[:, heads].to(final.dtype)]
        results.append([o, *torch.autograd.grad([o, final], own, loss)])
    found = {}
    for name, a, b in zip(("o", *NAMES), *results, strict=True):
        a = a[:2] if name in ("A_log", "dt_bias") else a[:, :2]
        found[name] = float((a.detach().double() - b).norm() / b.detach().norm())
    return found


class Stages:
    """A slab of the backward of a row, part by part; `count` slabs make the row."""

    def __init__(self, row: kda.Chunked, inputs: kda.Inputs, **options: object) -> None:
        q, _, v = inputs.args[:3]
        dim, precision = q.shape[-1], PRECISIONS[q.dtype]
        blocks = choose_blocks(dim, dim, precision)
        settings = (row.lengths, kda.LOWER_BOUND, dim**-0.5, False, blocks, precision)
        self.call = Call(*settings, **options)  # type: ignore[arg-type]
        self.inputs = Inputs(*inputs.args, None)
        self.blocks = choose_backward_blocks(dim, precision)
        self.plan = backward.plan_of(self.call, self.inputs)
        self.part, self.count = self.plan.slabs[0], len(self.plan.slabs)
        self.record = backward.make_record(self.call, self.inputs, self.plan)
        self.o, _, self.saved = self.forward()
        self.space = backward.make_workspaces(self.call, self.inputs, self.plan, self.record)[-1]
        self.d_o = torch.randn_like(v)
        self.grads = backward.make_gradients(self.call, self.inputs, self.plan, None)
        for run in (self.prep, self.kept, self.reverse, self.chunks):
            run()

    def forward(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All slabs, with what the backward wants."""
        return backward.forward_and_states(self.call, self.inputs, self.plan, (), None, self.record)

    def prep(self) -> None:
        """Only where tiles are not saved."""
        if self.record is None:
            make_slab_tiles(self.call, self.inputs, self.part, self.space.tiles)

    def kept(self) -> None:
        """Only where states are not saved."""
        if self.saved is not None:
            keep_states(self.call, self.inputs, self.part, self.saved, self.space)

    def reverse(self, blocks: BackwardBlocks | None = None) -> None:
        """From the state that the last call left, which no time depends on."""
        own = blocks or self.blocks
        run_reverse(self.call, self.part, self.space, self.d_o, self.grads, own)

    def chunks(self, blocks: BackwardBlocks | None = None) -> None:
        """The last kernel."""
        rest = (self.o, self.d_o, self.grads, blocks or self.blocks)
        run_chunks(self.call, self.inputs, self.part, self.space, *rest)


def sweep() -> Iterator[tuple[str, BackwardBlocks]]:
    """Tiles worth trying at D = 128 in bfloat16, with the stage that they belong to."""
    start = BackwardBlocks(64)
    for values, warps, depth in ((64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3)):
        yield "reverse", replace(start, values=values, few_values=values, warps=warps, stages=depth)
    for channels, values, warps, depth, cap in (
        (64, 32, 4, 3, 168),
        (64, 32, 4, 2, 168),
        (64, 32, 4, 4, 168),
        (64, 64, 4, 2, 168),
        (64, 32, 4, 3, None),
        (128, 128, 8, 2, None),
    ):
        own = {"channels": channels, "chunk_values": values, "chunk_warps": warps}
        yield "chunks", replace(start, **own, chunk_stages=depth, chunk_registers=cap)


def run_row(row: kda.Chunked, gate: str, repeats: int) -> dict:
    """Times and memory of one row."""
    inputs = kda.draw_chunked(row, gate, torch.bfloat16, "cuda", kda.HEAD_DIM)
    inputs.named.pop("initial_state_NHVK")
    call = training(inputs)
    column = kda.GATES.index(gate)
    result = {
        "row": f"kda_chunk fwd+bwd {row.name}",
        "gate": gate,
        "peak_gb": peak_gb(call),
        "event_us": timing.event_us(call, repeats),
        "graph_us": timing.graph_us([call], repeats),
        "public_us": row.public_us[column],
        "target_us": row.target_us[column],
    }
    stages = Stages(row, inputs)
    result["forward_us"] = timing.graph_us([stages.forward], repeats)
    for name in ("prep", "kept", "reverse", "chunks"):
        result[f"{name}_us"] = stages.count * timing.graph_us([getattr(stages, name)], repeats)
    return result


def run_sweep(repeats: int) -> Iterator[dict]:
    """Every tile of each stage on the first row, those of the reverse scan also on that of few
    heads; failures are kept."""
    for row, names in ((ROWS[0], ("chunks", "reverse")), (ROWS[2], ("reverse",))):
        inputs = kda.draw_chunked(row, "fast", torch.bfloat16, "cuda", kda.HEAD_DIM)
        stages = Stages(row, inputs)
        for name, blocks in (x for x in sweep() if x[0] in names):
            result: dict = {"row": row.name, "stage": name, "blocks": str(blocks)}
            try:
                stage = partial(getattr(stages, name), blocks)
                result["us"] = stages.count * timing.graph_us([stage], repeats)
            except Exception as error:  # a tile that does not fit the chip is a result
                result["failure"] = f"{type(error).__name__}: {error}"[:200]
            yield result


def dry_run() -> None:
    """Everything once on tiny interpreted shapes."""
    row = kda.Chunked("dry", (70, 9), 2, (0, 0), (0, 0))
    for gate in kda.GATES:
        print(gate, errors(row, gate, torch.float16, "cpu", 32))
    for saves in Saves:
        Stages(row, kda.draw_chunked(row, "fast", torch.float16, "cpu", 32), saves=saves)
    print(f"{len(list(sweep()))} tiles in the sweep")


def main() -> None:
    """Run the rows or the sweep, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        return dry_run()
    results: list[dict] = []
    if args.sweep:
        found: Iterator[dict] = run_sweep(10)
    else:
        for gate in kda.GATES:
            found_errors = errors(CHECKED, gate, torch.bfloat16, "cuda", kda.HEAD_DIM)
            results.append({"row": "errors bfloat16", "gate": gate, **found_errors})
            print(results[-1], flush=True)
        found = (run_row(row, gate, 20) for row in ROWS for gate in kda.GATES)
    for result in found:
        print(result, flush=True)
        results.append(result)
        if args.out:
            args.out.write_text(json.dumps({**timing.run_record(), "rows": results}, indent=1))


if __name__ == "__main__":
    main()
