"""K3's kernels on a CUDA device: times, byte floors and errors beside the public figures.

    python benchmarks/kernels.py --device cuda --out kernels.json        all rows
    python benchmarks/kernels.py --device cuda --only "T=8192 H=24"      rows whose name holds it
    python benchmarks/kernels.py --device cuda --sweep --out sweep.json  block sizes
    TRITON_INTERPRET=1 python benchmarks/kernels.py --device cpu         does it all run? no times

Times are medians in microseconds: `event` of single calls between two CUDA events (the protocol of
the public forward figures), `graph` of graph replay (that of the decode figures). `public` is the
best public implementation on an H200 at that gate, measured 2026-11-30 with torch 2.11 and triton
3.6.0. `error` is the RMS error ratio of o and of the final state on two heads against float64.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import kernels_kda as kda
import kernels_timing as timing
import torch

REPEATS = 200


def chunked_row(row: kda.Chunked, gate: str) -> dict:
    """Times of one prefill row at one gate."""
    inputs = kda.draw_chunked(row, gate, torch.bfloat16, "cuda", kda.HEAD_DIM)
    call = partial(kda.kda_chunk, *inputs.args, **inputs.named)
    column = kda.GATES.index(gate)
    repeats = REPEATS if sum(row.lengths) < 20_000 else REPEATS // 4
    result = {
        "row": f"kda_chunk {row.name}",
        "gate": gate,
        "event_us": timing.event_us(call, repeats),
        "graph_us": timing.graph_us([call], repeats),
        "floor_bytes": kda.chunked_bytes(row, kda.HEAD_DIM),
        "public_us": row.public_us[column],
        "target_us": row.target_us[column],
    }
    for name, stage in kda.stages(row, inputs).items():
        result[f"{name}_us"] = timing.graph_us([stage], repeats)
    if sum(row.lengths) < 20_000:
        result["error"] = kda.chunked_error(row, inputs)
    return result


def decode_rows(row: kda.Decode) -> list[dict]:
    """Times of one decode row: as the peer's call and fused, on one set of states and rotating."""
    results = []
    for name, draw in (("kda_step", kda.draw_step), ("kda_decode", kda.draw_fused)):
        for is_rotating in (False, True):
            calls = draw(row, is_rotating, torch.bfloat16, "cuda", kda.HEAD_DIM)
            calls = calls * max(1, 10 // len(calls))
            results.append(
                {
                    "row": f"{name} B={row.rows} H={row.num_heads}" + " rotating" * is_rotating,
                    "gate": "fast",
                    "graph_us": timing.graph_us(calls, REPEATS),
                    "floor_bytes": kda.decode_bytes(row, kda.HEAD_DIM),
                    "public_us": row.public_us,
                    "target_us": row.target_us,
                }
            )
    return results


def sweep_rows(only: str) -> list[dict]:
    """Prep and scan of the matching prefill rows with every block size; failures are kept."""
    results = []
    for row in (r for r in kda.CHUNKED if only in r.name):
        inputs = kda.draw_chunked(row, "fast", torch.bfloat16, "cuda", kda.HEAD_DIM)
        for blocks in kda.sweep():
            result = {"row": row.name, "blocks": asdict(blocks)}
            try:
                for name, stage in kda.stages(row, inputs, blocks).items():
                    result[f"{name}_us"] = timing.graph_us([stage], 20)
            except Exception as error:  # a block size that does not fit the chip is a result
                result["error"] = f"{type(error).__name__}: {error}"[:200]
            results.append(result)
            print(result, flush=True)
    return results


def step_sweep_rows(only: str) -> list[dict]:
    """kda_step of the matching decode rows, rotating, with every block size."""
    results = []
    for row in (r for r in kda.DECODE if only in f"decode B={r.rows}"):
        for blocks in kda.STEP_SWEEP:
            calls = kda.draw_step(row, True, torch.bfloat16, "cuda", kda.HEAD_DIM, blocks)
            calls = calls * max(1, 10 // len(calls))
            result = {"row": f"decode B={row.rows}", "blocks": asdict(blocks)}
            results.append({**result, "graph_us": timing.graph_us(calls, 50)})
            print(results[-1], flush=True)
    return results


def dry_run() -> None:
    """Every row's calls once, on tiny interpreted shapes; checks the errors, prints no times."""
    for gate in kda.GATES:
        row = kda.Chunked("dry", (70, 9), 2, (0, 0), (0, 0))
        inputs = kda.draw_chunked(row, gate, torch.float16, "cpu", 32)
        for stage in kda.stages(row, inputs, segment_chunks=1).values():
            stage()
        print(f"{gate}: error {kda.chunked_error(row, inputs)}")
    step = kda.Decode(2, 0, 0, num_heads=2)
    for draw in (kda.draw_step, kda.draw_fused):
        draw(step, False, torch.float16, "cpu", 32)[0]()
    print(f"{len(list(kda.sweep()))} block sizes in the sweep")


def table(results: list[dict], rate: float) -> str:
    """Markdown, with the byte floor at the copy rate of this run."""
    names = ("event_us", "graph_us", "prep_us", "scan_us", "public_us", "target_us")
    lines = ["| row | gate | " + " | ".join(names) + " | floor_us | error |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for result in results:
        times = [f"{result[name]:.1f}" if name in result else "-" for name in names]
        floor = result["floor_bytes"] / rate * 1e6
        error = " / ".join(f"{e:.1e}" for e in result.get("error", ()))
        cells = [result["row"], result["gate"], *times, f"{floor:.1f}", error]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the rows and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        return dry_run()
    rate = timing.copy_rate()
    if args.sweep:
        results = sweep_rows(args.only) + step_sweep_rows(args.only)
    else:
        rows = [row for row in kda.CHUNKED if args.only in row.name]
        results = [chunked_row(row, gate) for row in rows for gate in kda.GATES]
        steps = [row for row in kda.DECODE if args.only in f"decode B={row.rows}"]
        results += [result for row in steps for result in decode_rows(row)]
        print(table(results, rate))
    if args.out:
        record = {**timing.run_record(), "copy_rate": rate, "rows": results}
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
