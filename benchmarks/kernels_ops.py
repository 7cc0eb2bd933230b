"""The kernels beside KDA on a CUDA device: times beside a torch peer of the same run and a floor.

    python benchmarks/kernels_ops.py --device cuda --out ops.json       all rows
    python benchmarks/kernels_ops.py --device cuda --only attn_res glu  rows whose name holds one
    python benchmarks/kernels_ops.py --device cuda --sweep --out s.json every tile of every row
    TRITON_INTERPRET=1 python benchmarks/kernels_ops.py --device cpu    does it all run? no times

Times are medians in microseconds: `event` of single calls between two CUDA events, `graph` of graph
replay over all copies of the inputs, so that small ones do not stay in the second-level cache,
`peer` and `beside` of the peer's calls and ours in turn.
`floor` is the larger of bytes at this run's copy rate and FLOP at this run's bfloat16 matrix rate;
`public` the best figure of h200 runs on record (2026-11-30), `target` the most that is wanted.
`error` is the norm of the difference over that of a float64 (or the peer's) result on some rows.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import kernels_timing as timing
import torch
from kernels_ops_cases import Case
from kernels_ops_rows import ROWS, Row

REPEATS = 50


@dataclass
class Result:
    """One row of the table; times in microseconds, None where they were not taken."""

    row: str
    config: str
    event_us: float | None = None
    graph_us: float | None = None
    peer_us: float | None = None
    beside_us: float | None = None
    peer: str = ""
    floor_us: float | None = None
    public_us: float | None = None
    target_us: float | None = None
    error: float | None = None
    failure: str = ""


def matrix_rate() -> float:
    """FLOP a second of an 8192-cubed bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (timing.event_us(lambda: a @ b, 20) * 1e-6)


def measure(row: Row, case: Case, rates: tuple[float, float], config: str) -> Result:
    """Times of one row; what goes wrong is kept as text, so that the other rows still run."""
    floor = max(case.num_bytes / rates[0], case.num_flop / rates[1]) * 1e6
    result = Result(row.name, config, floor_us=floor, public_us=row.public, target_us=row.target)
    try:
        result.error = case.error()
        result.event_us = timing.event_us(case.calls[0], REPEATS)
        result.graph_us = timing.graph_us(case.calls, REPEATS)
    except Exception as error:  # a tile that does not fit the chip is a result
        result.failure = f"{type(error).__name__}: {error}"[:300]
    return result


def measure_peer(case: Case, result: Result) -> None:
    """The torch peer and ours in turn (`beside`), in the same process."""
    if case.peer is None:
        return
    result.peer = case.peer_name
    try:
        in_turn = timing.in_turn_us([case.peer, case.calls[0]], REPEATS // 5)
        result.peer_us, result.beside_us = in_turn
    except Exception as error:
        result.peer = f"{case.peer_name}: {type(error).__name__}: {error}"[:200]


def chosen(only: list[str]) -> list[Row]:
    """The rows whose name holds one of the given words."""
    return [row for row in ROWS if any(word in row.name for word in only)]


def run_rows(only: list[str], is_sweep: bool) -> Iterator[Result]:
    """Every row with its default tile, or with each of its tiles."""
    rates = timing.copy_rate(), matrix_rate()
    print(f"copy {rates[0] / 1e12:.2f} TB/s, bfloat16 matrix {rates[1] / 1e12:.0f} TFLOP/s")
    for row in (row for row in chosen(only) if row.configs or not is_sweep):
        case = row.make(True, "cuda", torch.bfloat16)
        configs = row.configs if is_sweep else (lambda: "default",)
        for choose in configs:
            result = measure(row, case, rates, choose())
            if not is_sweep:
                measure_peer(case, result)
            print(line(result), flush=True)
            yield result
        del case
        torch.cuda.empty_cache()


def line(result: Result) -> str:
    """One row of the Markdown table."""
    if result.failure:
        return f"| {result.row} | {result.config} | {result.failure} |"
    times = ("event_us", "graph_us", "peer_us", "beside_us", "floor_us", "public_us", "target_us")
    cells = [f"{t:.1f}" if (t := getattr(result, name)) is not None else "-" for name in times]
    error = "-" if result.error is None else f"{result.error:.1e}"
    return f"| {result.row} | {result.config} | {' | '.join(cells)} | {error} | {result.peer} |"


def dry_run(only: list[str]) -> None:
    """Every row's calls once on tiny shapes, interpreted; checks the errors, prints no times."""
    for row in chosen(only):
        case = row.make(False, "cpu", torch.float16)
        for call in case.calls:
            call()
        if case.peer is not None:
            case.peer()
        print(f"{row.name}: error {case.error():.1e}, {len(row.configs)} tiles in the sweep")


def main() -> None:
    """Run the rows, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        return dry_run(args.only)
    print("| row | tile | event | graph | peer | beside | floor", end=" ")
    print("| public | target | error | peer is |\n" + "|---" * 11 + "|")
    results = []
    for result in run_rows(args.only, args.sweep):
        results.append(asdict(result))
        if args.out:
            record = timing.run_record()
            args.out.write_text(json.dumps({**record, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
