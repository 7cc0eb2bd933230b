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
from k3_kernels.kda_chunk.config import PRECISIONS, choose_blocks
from k3_kernels.kda_chunk.forward import Call, Inputs

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
        found[name] = float((a.double() - b).norm() / b.norm())
    return found


def stages(
    row: kda.Chunked, inputs: kda.Inputs, blocks: BackwardBlocks | None = None
) -> dict[str, tuple[Callable[[], object], int]]:
    """The launches of a slab of the backward by stage, each with the number of slabs."""
    q, _, v = inputs.args[:3]
    dim, precision = q.shape[-1], PRECISIONS[q.dtype]
    own = Inputs(*inputs.args, None)
    call = Call(
        row.lengths,
        kda.LOWER_BOUND,
        dim**-0.5,
        False,
        choose_blocks(dim, dim, precision),
        precision,
    )
    plan = backward.plan_of(call, own)
    o, _, saved = backward.forward_and_states(call, own, plan, (), None)
    blocks = blocks or choose_backward_blocks(dim, dim, precision)
    part, space = plan.slabs[0], backward.make_workspace(call, own, plan.most_chunks)
    d_o, grads = torch.randn_like(v), backward.make_gradients(call, own, plan, None)
    recompute = partial(backward.recompute, call, own, part, saved, space)
    reverse = partial(backward.run_reverse, call, part, space, d_o, grads, blocks)
    chunks = partial(backward.run_chunks, call, own, part, space, o, d_o, grads, blocks)
    recompute(), reverse()
    return {
        "recompute": (recompute, len(plan.slabs)),
        "reverse": (reverse, len(plan.slabs)),
        "chunks": (chunks, len(plan.slabs)),
    }


def sweep() -> Iterator[tuple[str, BackwardBlocks]]:
    """Tiles worth trying at D = 128 in bfloat16, with the stage that they belong to."""
    start = BackwardBlocks(64)
    for values, warps, depth in ((64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3)):
        yield "reverse", replace(start, values=values, few_values=values, warps=warps, stages=depth)
    for channels, values, warps, depth, cap in (
        (64, 32, 4, 2, 168),
        (64, 64, 4, 2, 168),
        (64, 16, 4, 2, 168),
        (64, 32, 4, 3, 168),
        (64, 32, 4, 2, 128),
        (64, 32, 4, 2, None),
        (64, 64, 4, 2, None),
        (32, 32, 4, 2, 168),
        (128, 64, 8, 2, None),
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
    for name, (stage, count) in stages(row, inputs).items():
        result[f"{name}_us"] = count * timing.graph_us([stage], repeats)
    return result


def run_sweep(repeats: int) -> Iterator[dict]:
    """Every tile of each stage on the first row, those of the reverse scan also on that of few
    heads; failures are kept."""
    for row, names in ((ROWS[0], ("chunks", "reverse")), (ROWS[2], ("reverse",))):
        inputs = kda.draw_chunked(row, "fast", torch.bfloat16, "cuda", kda.HEAD_DIM)
        for name, blocks in (x for x in sweep() if x[0] in names):
            result: dict = {"row": row.name, "stage": name, "blocks": str(blocks)}
            try:
                stage, count = stages(row, inputs, blocks)[name]
                result["us"] = count * timing.graph_us([stage], repeats)
            except Exception as error:  # a tile that does not fit the chip is a result
                result["failure"] = f"{type(error).__name__}: {error}"[:200]
            yield result


def dry_run() -> None:
    """Everything once on tiny interpreted shapes."""
    row = kda.Chunked("dry", (70, 9), 2, (0, 0), (0, 0))
    for gate in kda.GATES:
        print(gate, errors(row, gate, torch.float16, "cpu", 32))
    for stage, _ in stages(row, kda.draw_chunked(row, "fast", torch.float16, "cpu", 32)).values():
        stage()
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
