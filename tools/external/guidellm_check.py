"""Prints what a report of guidellm says of its requests; exit code 1 unless all succeeded.

Usage: python tools/external/guidellm_check.py REPORT.json
"""

import json
import sys
from pathlib import Path


def main() -> int:
    """One line a benchmark; a request that the end of the time cut off is no failure."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    is_good = bool(report["benchmarks"])
    for benchmark in report["benchmarks"]:
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]
        print({name: totals[name] for name in ("successful", "errored", "incomplete")})
        for name in (
            "time_to_first_token_ms",
            "inter_token_latency_ms",
            "output_tokens_per_second",
        ):
            values = metrics[name]["successful"]
            print(f"{name}: mean {values['mean']:.1f}, median {values['median']:.1f}")
        is_good = is_good and totals["successful"] > 0 and totals["errored"] == 0
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
