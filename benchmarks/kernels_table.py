"""The table of kernels in docs/performance.md, from the files that the other scripts wrote.

    python benchmarks/kernels_table.py FOLDER/*.json            prints it
    python benchmarks/kernels_table.py FOLDER/*.json --write    replaces it in the document

The files are those of kernels.py, kernels_ops.py and, for the second table, kernels_fla.py.

Times in microseconds: of single calls between events, for decode of graph replay, as the public
figures were taken. Two figures are those of the fast and of the slow gate. A row meets its goal
when all of its figures do.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"


@dataclass(frozen=True)
class Line:
    """One row of the document: its title and the rows of the files whose figures it shows."""

    title: str
    rows: tuple[str, ...]
    time: str = "event_us"


LINES = (
    Line("KDA forward, T=8192 H=96, one sequence", ("kda_chunk T=8192 H=96",)),
    Line("KDA forward, T=8192 H=96, six mixed lengths", ("kda_chunk T=8192 H=96 mixed",)),
    Line("KDA forward, 8 x 1024, H=96", ("kda_chunk 8x1024 H=96",)),
    Line("KDA forward, T=65536 H=96", ("kda_chunk T=65536 H=96",)),
    Line("KDA forward, T=8192 H=24", ("kda_chunk T=8192 H=24",)),
    Line("KDA forward, T=65536 H=24", ("kda_chunk T=65536 H=24",)),
    Line(
        "KDA decode, B=1 / 8 / 64 / 256, H=96",
        tuple(f"kda_step B={rows} H=96" for rows in (1, 8, 64, 256)),
        "graph_us",
    ),
    Line("AttnRes, 8192 x 7168, 9 sources", ("attn_res 9 sources",)),
    Line("conv width 4 + SiLU, 8192 x 12288", ("short_conv",)),
    Line("experts up, 112 x (3584 -> 6144), 128 rows, MXFP4", ("experts up 128 rows MXFP4",)),
    Line("MLA prefill 192/128, T=8192 H=96, float32 output", ("mla_prefill T=8192 H=96",)),
    Line("MLA decode, B=64, 32K tokens, H=96", ("mla_decode B=64 32K",)),
    Line("router, 8192 x 896, top 16", ("route_topk 896 top-16",)),
)
ALSO = (
    Line(
        "KDA decode past the L2, B=1 / 8 / 64 / 256",
        tuple(f"kda_step B={rows} H=96 rotating" for rows in (1, 8, 64, 256)),
        "graph_us",
    ),
    Line(
        "KDA decode, conv to gated norm fused, past the L2",
        tuple(f"kda_decode B={rows} H=96 rotating" for rows in (1, 8, 64, 256)),
        "graph_us",
    ),
)


def figures(line: Line, results: list[dict]) -> list[dict]:
    """The results of a line, in its order; one for each gate where there are two."""
    found = [r for name in line.rows for r in results if r["row"] == name]
    if len({r["row"] for r in found}) != len(line.rows):
        raise SystemExit(f"no figures for {line.title}: run the scripts without --only")
    return found


def joined(values: list[float | None]) -> str:
    """Equal neighbours once, what was not taken as a dash."""
    texts = ["-" if v is None else f"{v:.1f}" if v < 100 else f"{v:.0f}" for v in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def cells(line: Line, results: list[dict], rate: float) -> list[str]:
    """Title, floor, public, goal, ours, times as fast as public, goal met, peers of the run; of a
    line that has no goal, what is its own."""
    found = figures(line, results)
    ours = [r[line.time] for r in found]
    public, goals = ([r.get(key) for r in found] for key in ("public_us", "target_us"))
    floors = [r.get("floor_us") or r["floor_bytes"] / rate * 1e6 for r in found]
    ratios = [p / o if p else None for p, o in zip(public, ours, strict=True)]
    if line in ALSO:
        return [line.title, joined(floors), "-", "-", joined(ours), "-", "-", "-"]
    is_met = all(g is None or o <= g for g, o in zip(goals, ours, strict=True))
    times = [joined(values) for values in (floors, public, goals, ours)]
    faster = "-" if None in ratios else " / ".join(f"{r:.2f}" for r in ratios)
    peers = [r for r in found if r.get("peer_us")]
    turns = [f"{r['peer']}: {r['peer_us']:.0f}, K3 {r['beside_us']:.0f}" for r in peers]
    beside = "; ".join(turns) or "-"
    return [line.title, *times, faster, "yes" if is_met else "no", beside]


def beside_fla(results: list[dict]) -> Iterator[str]:
    """The rows that were measured in one run with fla-core."""
    yield "| work | gate | K3 | fla-core 0.6.0 | with its safe gate | times as fast | difference |"
    yield "|---" * 7 + "|"
    for r in results:
        theirs = [r[key] for key in ("fla_us", "fla_safe_us") if key in r]
        times = [joined([r.get(key)]) for key in ("ours_us", "fla_us", "fla_safe_us")]
        ratio, difference = f"{min(theirs) / r['ours_us']:.2f}", f"{r['difference']:.1e}"
        yield f"| {' | '.join([r['row'], r['gate'] or '-', *times, ratio, difference])} |"


def table(files: list[dict]) -> Iterator[str]:
    """The lines of the document's section."""
    rate = next(file["copy_rate"] for file in files if "copy_rate" in file)
    rows = [row for file in files for row in file["rows"]]
    results, with_fla = ([r for r in rows if ("fla_us" in r) is flag] for flag in (False, True))
    first = files[0]
    versions = f"torch {first['torch']}, triton {first['triton']}"
    yield f"{first['date']}, one {first['device']}, {versions}:"
    yield from (f"`{file['command']}`" for file in files)
    yield f"Copy rate of the run: {rate / 1e12:.2f} TB/s."
    yield ""
    yield "| work | floor | public | goal | K3 | times as fast | goal met | torch and K3 in turn |"
    yield "|---" * 8 + "|"
    for line in (*LINES, *ALSO):
        yield "| " + " | ".join(cells(line, results, rate)) + " |"
    if with_fla:
        yield ""
        yield from beside_fla(with_fla)


def main() -> None:
    """Print the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = "\n".join(table([json.loads(file.read_text()) for file in args.files]))
    if not args.write:
        return print(text)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        raise SystemExit(f"{DOCUMENT} has no {BEGIN} and {END} to write between")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
