"""Where a step of the serving engine spends the time on a CPU, and what a warm prefix saves.

    python benchmarks/serve_cpu.py [--model k3-nano] [--threads 1] [decode prefix]

The engine runs in the calling thread on a clock that counts its own CPU time only, so that other
programs on the machine hardly enter. What HTTP adds is in `k3 bench serve`, which measures a
server from outside.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import torch

from k3_core.engine import Request, Sampling
from k3_core.engine.load import load_model
from k3_serve.engine.core import ContinuousEngine
from k3_serve.observer import Silent


class Phases(Silent):
    """Seconds of the phases of every step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def observe(self, name: str, value: float, labels: dict[str, str] | None = None) -> None:
        if name == "k3_step_seconds" and labels:
            self.seconds.setdefault(labels["phase"], []).append(value)


class Clocked(ContinuousEngine):
    """Steps when it is told to; `now` is the CPU seconds that its steps took."""

    def _start(self) -> None:
        self.now = 0.0

    def step(self) -> bool:
        """What was asked for, and one step; False when there is nothing to do."""
        begin = time.thread_time()
        with torch.inference_mode():
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    command()
            if self._is_idle():
                return False
            self._turn()
        self.now += time.thread_time() - begin
        return True


@dataclass(frozen=True)
class Bench:
    """A loaded model, and engines over it."""

    model: object

    def engine(self, observer: Phases | None = None) -> Clocked:
        """A new engine with an empty cache."""
        return Clocked(self.model, observer=observer)  # type: ignore[arg-type]

    def request(self, rng: random.Random, num_tokens: int, output: int) -> Request:
        """Random ids; it goes on to its last token."""
        ids = tuple(rng.randrange(10, 3_000) for _ in range(num_tokens))
        return Request(ids, sampling=Sampling(temperature=0, max_tokens=output, stop_ids=()))

    def decode(self) -> None:
        """Milliseconds of the phases and tokens a second, for one request and for eight."""
        rates = []
        for count in (1, 8):
            phases, rng = Phases(), random.Random(0)
            engine = self.engine(phases)
            for _ in range(count):
                engine.submit(self.request(rng, 17, 100))
            times = []
            while True:
                before = engine.now
                if not engine.step():
                    break
                times.append(engine.now - before)
            step = statistics.median(times)
            rates.append(count / step)
            parts = {k: f"{1e3 * statistics.median(v):.2f}" for k, v in phases.seconds.items()}
            print(f"decode {count}: {1e3 * step:.2f} ms CPU a step, {count / step:.0f} tokens/s")
            print(f"  wall ms by phase {parts}; the fastest step {1e3 * min(times):.2f} ms CPU")
        print(f"  concurrency 8 over 1: {rates[1] / rates[0]:.2f}")

    def prefix(self) -> None:
        """Cold and warm time to the first token behind 4,000 shared tokens."""
        engine, rng = self.engine(), random.Random(0)
        shared = self.request(rng, 4_000, 1).token_ids
        took = []
        for _ in range(4):
            own = self.request(rng, 60, 1)
            begin = engine.now
            engine.submit(Request(shared + own.token_ids, sampling=own.sampling))
            while engine.step():
                pass
            took.append(engine.now - begin)
        warm = ", ".join(f"{1e3 * t:.0f} ms (1/{took[0] / t:.1f})" for t in took[1:])
        print(f"prefix: cold {1e3 * took[0]:.0f} ms; warm {warm}")


def main() -> None:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["decode", "prefix"])
    parser.add_argument("--model", default="k3-nano")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = load_model(args.model, experts="dequantized")
    bench = Bench(model)
    for part in args.parts:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
