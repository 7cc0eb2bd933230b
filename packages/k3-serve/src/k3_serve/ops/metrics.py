"""The metrics of serving 9e, in a registry of their own, as Prometheus text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from k3_serve.observer import NONE, Labels

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Declared(NamedTuple):
    """A metric: its kind, name, help and labels beside `model`."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()


TABLE = (
    Declared("gauge", "k3_requests_running", "Requests that run.", ("class",)),
    Declared("gauge", "k3_requests_waiting", "Requests that wait for room.", ("class",)),
    Declared("gauge", "k3_requests_restoring", "Requests that wait for a tier.", ("class",)),
    Declared("counter", "k3_requests_total", "Requests that ended.", ("outcome", "class")),
    Declared("histogram", "k3_ttft_seconds", "Submission to first token.", ("class",)),
    Declared("histogram", "k3_itl_seconds", "Time between two tokens.", ("class",)),
    Declared("histogram", "k3_e2e_seconds", "Submission to last token.", ("class",)),
    Declared("histogram", "k3_queue_seconds", "Submission to first step.", ("class",)),
    Declared("counter", "k3_prompt_tokens_total", "Prompt tokens.", ("class",)),
    Declared("counter", "k3_generation_tokens_total", "Generated tokens.", ("class",)),
    Declared("counter", "k3_reasoning_tokens_total", "Generated tokens of reasoning.", ("class",)),
    Declared("histogram", "k3_step_seconds", "Time of a step, by phase.", ("phase",)),
    Declared("histogram", "k3_step_tokens", "Tokens of a step."),
    Declared("counter", "k3_preemptions_total", "Requests taken out for others.", ("class",)),
    Declared(
        "counter", "k3_admission_rejected_total", "Requests not admitted.", ("class", "reason")
    ),
    Declared("counter", "k3_cache_lookup_tokens_total", "Prompt tokens looked up."),
    Declared("counter", "k3_mla_match_tokens_total", "Tokens whose latents were cached."),
    Declared("counter", "k3_state_hit_tokens_total", "Tokens reused: latents and state agree."),
    Declared(
        "counter",
        "k3_uncached_common_prefix_tokens_total",
        "Tokens with cached latents and no state: a junction is missing.",
    ),
    Declared("counter", "k3_state_checkpoint_hits_total", "Lookups that found a checkpoint."),
    Declared("counter", "k3_state_checkpoint_misses_total", "Lookups that found none."),
    Declared("counter", "k3_state_checkpoint_taken_total", "Checkpoints taken."),
    Declared("counter", "k3_state_checkpoint_recycled_total", "Checkpoints superseded."),
    Declared("counter", "k3_state_checkpoint_evicted_total", "Checkpoints evicted."),
    Declared("gauge", "k3_cache_bytes", "Bytes of cached latents and states.", ("kind", "tier")),
    Declared(
        "counter", "k3_cache_moved_bytes_total", "Bytes between tiers.", ("kind", "from", "to")
    ),
    Declared("histogram", "k3_cache_restore_seconds", "Time of a restore.", ("kind", "tier")),
    Declared("counter", "k3_restore_fallback_total", "Restores that became prefill.", ("reason",)),
    Declared("counter", "k3_tier_lookups_total", "Searches of a tier.", ("tier", "result")),
    Declared("counter", "k3_tier_dropped_total", "Prefixes not kept.", ("tier", "reason")),
    Declared("counter", "k3_tier_ignored_files_total", "Files not used.", ("reason",)),
    Declared("gauge", "k3_tier_prefixes", "Prefixes that a tier holds.", ("tier",)),
    Declared("gauge", "k3_pages", "Pages of the arena.", ("state",)),
    Declared("counter", "k3_spec_drafted_total", "Draft tokens proposed."),
    Declared("counter", "k3_spec_accepted_total", "Draft tokens accepted."),
    Declared("histogram", "k3_spec_replay_seconds", "Time to replay accepted tokens."),
    Declared("histogram", "k3_grammar_compile_seconds", "Time to compile a grammar."),
    Declared("counter", "k3_media_rejected_total", "Images and videos refused.", ("reason",)),
    Declared("counter", "k3_nan_rows_total", "Rows whose logits were not finite."),
    Declared("counter", "k3_engine_restarts_total", "Times the engine's loop began anew."),
)


Family = TypeVar("Family", Counter, Gauge, Histogram)


class _Families(dict[str, Family]):
    """The metrics of one kind by name."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._children: dict[tuple[object, ...], Family] = {}

    def child(self, name: str, labels: Labels) -> Family:
        """What counts for these labels; kept, since the library takes its time to find it."""
        key = (name, *labels.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self[name].labels(model=self._model, **labels)
        return child


class Metrics:
    """An `Observer` that keeps everything for Prometheus, labelled with the served model."""

    def __init__(self, model: str, *, has_vllm_names: bool = False) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._counters: _Families[Counter] = _Families(model)
        self._gauges: _Families[Gauge] = _Families(model)
        self._histograms: _Families[Histogram] = _Families(model)
        for item in TABLE:
            self._declare(item)
        self._refreshers: list[Callable[[], None]] = []
        self._scrape = threading.Lock()
        self._aliases = CollectorRegistry()
        if has_vllm_names:
            self._aliases.register(_VllmNames(self))

    def count(self, name: str, amount: float = 1.0, labels: Labels = NONE) -> None:
        self._counters.child(name, labels).inc(amount)

    def observe(self, name: str, value: float, labels: Labels = NONE) -> None:
        self._histograms.child(name, labels).observe(value)

    def set(self, name: str, value: float, labels: Labels = NONE) -> None:
        self._gauges.child(name, labels).set(value)

    def value(self, name: str, labels: Labels = NONE) -> float:
        """A counter or gauge summed over the labels not given; 0 for what nothing reported."""
        family_of = self._counters if name in self._counters else self._gauges
        wanted = {"model": self._model, **labels}.items()
        total = 0.0
        for family in family_of[name].collect():
            for sample in family.samples:
                if sample.name == name and wanted <= sample.labels.items():
                    total += sample.value
        return total

    def before_scrape(self, refresh: Callable[[], None]) -> None:
        """Calls a function at the beginning of each scrape: it sets what is cheap to look up."""
        self._refreshers.append(refresh)

    def render(self) -> bytes:
        """The exposition in the text format, of type `CONTENT_TYPE`."""
        with self._scrape:
            for refresh in self._refreshers:
                refresh()
            return generate_latest(self._registry) + generate_latest(self._aliases)

    def _declare(self, item: Declared) -> None:
        labels, registry = ("model", *item.labels), self._registry
        family: Counter | Gauge | Histogram
        if item.kind == "counter":
            family = Counter(item.name, item.help, labels, registry=registry)
            self._counters[item.name] = family
        elif item.kind == "gauge":
            family = self._gauges[item.name] = Gauge(
                item.name, item.help, labels, registry=registry
            )
        else:
            buckets = TOKENS if item.name.endswith("_tokens") else SECONDS
            family = self._histograms[item.name] = Histogram(
                item.name, item.help, labels, registry=registry, buckets=buckets
            )
        if not item.labels:
            family.labels(model=self._model)  # shown as 0 before the first report


class _VllmNames(Collector):
    """The same figures under the names that routers made for vLLM read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        value = self._metrics.value
        used = sum(value("k3_pages", {"state": state}) for state in ("active", "pinned"))
        total = value("k3_pages")
        yield self._gauge("vllm:num_requests_running", value("k3_requests_running"))
        yield self._gauge("vllm:num_requests_waiting", value("k3_requests_waiting"))
        yield self._gauge("vllm:kv_cache_usage_perc", used / total if total else 0.0)
        yield from self._counters()

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, "As vLLM names it.", labels=("model_name",))
        family.add_metric((self._metrics._model,), value)
        return family

    def _counters(self) -> Iterator[Metric]:
        for name, ours in (
            ("vllm:prefix_cache_queries", "k3_cache_lookup_tokens_total"),
            ("vllm:prefix_cache_hits", "k3_state_hit_tokens_total"),
        ):
            family = CounterMetricFamily(name, "As vLLM names it.", labels=("model_name",))
            family.add_metric((self._metrics._model,), self._metrics.value(ours))
            yield family
