"""How long the commands take that must start fast: median of five warm runs, in seconds.

Usage: python benchmarks/cli_start.py
The floor beside them is the interpreter itself in the same environment.
"""

import statistics
import subprocess
import sys
import time

NUM_RUNS = 5
COMMANDS = ("--version", "--help", "plugins list", "plugins why attention kda", "info")


def main() -> None:
    """Print one line a command."""
    floor = median_seconds(["-c", "pass"])
    print(f"{'python -c pass':<28} {floor:.3f}")
    for command in COMMANDS:
        seconds = median_seconds(["-m", "k3_core.cli.app", *command.split()])
        print(f"{'k3 ' + command:<28} {seconds:.3f}  {seconds / floor:.1f}x")


def median_seconds(arguments: list[str]) -> float:
    """Median wall time of `python ARGUMENTS` after one run that warms the caches."""
    times = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
