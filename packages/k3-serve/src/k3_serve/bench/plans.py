"""What each workload of `k3 bench serve` runs, and the ratios that its goals are stated in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3_core.errors import K3Error
from k3_serve.bench.client import LoadClient, Record
from k3_serve.bench.figures import Figures, Spread, by_group
from k3_serve.bench.workloads import BURST_AT, SHORT_TOKENS, agent, burst, shared_prefix, synthetic

WORKLOADS = ("synthetic", "shared-prefix", "agent", "burst")
Result = tuple[list[Figures], dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """The sizes of a benchmark; 0 takes the workload's own default.

    `rate` is in requests a second. `concurrency`: each is one run of the synthetic workload, the
    first one that of the agents.
    """

    seed: int = 0
    num_requests: int = 0
    prompt_tokens: int = 200
    output_tokens: int = 0
    concurrency: tuple[int, ...] = (1, 8)
    rate: float = 0.0
    is_poisson: bool = True
    prefix_tokens: int = 4_000
    new_tokens: int = 64
    num_prefixes: int = 3
    num_turns: int = 9

    def run(self, workload: str, client: LoadClient) -> Result:
        """Figures and ratios of a workload; K3Error for an unknown one."""
        if workload not in WORKLOADS:
            raise K3Error(f"workload {workload!r} is not one of {', '.join(WORKLOADS)}")
        client.run(
            synthetic(
                self.seed,
                num_requests=2,
                prompt_tokens=self.prompt_tokens,
                output_tokens=8,
                concurrency=1,
                name="warm-up",
            )
        )
        run = {
            "synthetic": self._synthetic,
            "shared-prefix": self._shared_prefix,
            "agent": self._agent,
            "burst": self._burst,
        }
        return run[workload](client)

    def _synthetic(self, client: LoadClient) -> Result:
        if self.rate:
            return self._one_synthetic(client, f"{self.rate:g} a second", 0), {}
        found = [
            one
            for concurrency in self.concurrency
            for one in self._one_synthetic(client, f"{concurrency} at a time", concurrency)
        ]
        speeds = [one.tokens_per_second for one in found]
        ratios = {}
        for concurrency, speed in zip(self.concurrency[1:], speeds[1:], strict=True):
            name = f"tokens/s at {concurrency} over those at {self.concurrency[0]}"
            ratios.update(_ratio(name, speed, speeds[0]))
        return found, ratios

    def _one_synthetic(self, client: LoadClient, name: str, concurrency: int) -> list[Figures]:
        workload = synthetic(
            self.seed,
            num_requests=self.num_requests or max(8, 4 * concurrency),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens or 128,
            concurrency=concurrency,
            rate=self.rate,
            is_poisson=self.is_poisson,
            name=name,
        )
        return by_group(name, client.run(workload))

    def _shared_prefix(self, client: LoadClient) -> Result:
        workload = shared_prefix(
            self.seed,
            num_prefixes=self.num_prefixes,
            num_warm=self.num_requests or 4,
            prefix_tokens=self.prefix_tokens,
            new_tokens=self.new_tokens,
            output=self.output_tokens or 8,
        )
        found = by_group(workload.name, client.run(workload))
        first = {one.group: one.ttft.p50 for one in found}
        return found, _ratio("first token: cold over warm", first["cold"], first["warm"])

    def _agent(self, client: LoadClient) -> Result:
        workload = agent(
            self.seed,
            num_sessions=self.num_requests or 8,
            num_turns=self.num_turns,
            output_tokens=self.output_tokens or 32,
            concurrency=self.concurrency[-1],
        )
        found = by_group(workload.name, client.run(workload))
        prompt = sum(one.prompt_tokens for one in found)
        return found, _ratio("prompt tokens cached", sum(o.cached_tokens for o in found), prompt)

    def _burst(self, client: LoadClient) -> Result:
        """Short requests at half of the measured capacity, first alone, then beside long ones."""
        found, rate = [], self.rate
        output = self.output_tokens or 16
        if not rate:
            capacity = synthetic(
                self.seed,
                num_requests=64,
                prompt_tokens=SHORT_TOKENS,
                output_tokens=output,
                concurrency=max(self.concurrency),
                name="capacity",
            )
            found = by_group(capacity.name, client.run(capacity))
            rate = found[0].requests_per_second / 2
        if not rate:
            raise K3Error(f"no request was answered: {found[0].errors[0]}")
        alone, beside = (
            client.run(
                burst(
                    self.seed,
                    num_requests=self.num_requests or 300,
                    rate=rate,
                    output_tokens=output,
                    name=name,
                    has_burst=has_burst,
                )
            )
            for name, has_burst in (("alone", False), ("beside a burst", True))
        )
        found += [*by_group("alone", alone), *by_group("beside a burst", beside)]
        window = list(window_of(beside))
        parts = [[r for r in run if r.index in window] for run in (alone, beside)]
        ratios = {"short requests a second": rate, "of them in the window": float(len(window))}
        if window:
            found += [
                Figures.of(name, "short in the window", part)
                for name, part in zip(("alone", "beside a burst"), parts, strict=True)
            ]
            ratios |= _window_ratios(*parts)
        return found, ratios


def window_of(records: Sequence[Record]) -> Iterator[int]:
    """The short requests that came between the burst and the end of its last request."""
    end = max(r.begin + r.seconds for r in records if r.group == "long")
    for record in records:
        if record.group == "short" and BURST_AT <= record.begin <= end:
            yield record.index


def _window_ratios(alone: Sequence[Record], beside: Sequence[Record]) -> dict[str, float]:
    quiet, loaded = (
        Spread.of(record.ttft for record in part if not record.error) for part in (alone, beside)
    )
    median = "first token in the window: median beside a burst over that alone"
    return {
        **_ratio(median, loaded.p50, quiet.p50),
        **_ratio("the same of the 95th percentiles", loaded.p95, quiet.p95),
    }


def _ratio(name: str, value: float, base: float) -> dict[str, float]:
    """Nothing when there is nothing to compare with."""
    return {name: value / base} if base else {}
