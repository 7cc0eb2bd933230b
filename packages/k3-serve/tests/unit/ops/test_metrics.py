"""Metrics: the names of the specification, counted from events, on a route behind the key."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k3_core.engine import Event, EventStream, Request, Stats
from k3_serve.api.app import create_app
from k3_serve.cache.records import CacheCounters
from k3_serve.engine.stats import CacheStats
from k3_serve.ops.collect import EngineCollector
from k3_serve.ops.metrics import TABLE, Metrics
from k3_serve.ops.timing import RequestTimer
from k3_serve.settings import Settings
from k3_serve.testing import Script

# As the specification writes them (serving 9e).
NAMES = re.findall(
    r"\w+",
    """
k3_requests_running k3_requests_waiting k3_requests_restoring k3_requests_total k3_ttft_seconds
k3_itl_seconds k3_e2e_seconds k3_queue_seconds k3_prompt_tokens_total k3_generation_tokens_total
k3_reasoning_tokens_total k3_step_seconds k3_step_tokens k3_preemptions_total
k3_admission_rejected_total k3_cache_lookup_tokens_total k3_mla_match_tokens_total
k3_state_hit_tokens_total k3_uncached_common_prefix_tokens_total k3_state_checkpoint_hits_total
k3_state_checkpoint_misses_total k3_state_checkpoint_taken_total
k3_state_checkpoint_recycled_total k3_state_checkpoint_evicted_total k3_cache_bytes
k3_cache_moved_bytes_total k3_cache_restore_seconds k3_restore_fallback_total k3_pages
k3_spec_drafted_total k3_spec_accepted_total k3_spec_replay_seconds k3_grammar_compile_seconds
k3_media_rejected_total k3_nan_rows_total
""",
)
ANSWER = "hm<|close|>think<|sep|><|open|>response<|sep|>four<|close|>response<|sep|><|end_of_msg|>"


def samples(text: str) -> dict[str, float]:
    """Value by name and sorted labels, read by the client library's own parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_the_table_has_every_name_of_the_specification() -> None:
    assert set(NAMES) <= {item.name for item in TABLE}
    assert len({item.name for item in TABLE}) == len(TABLE)
    text = Metrics("m").render().decode()
    for name in NAMES:
        assert f"# TYPE {name} " in text


def test_a_figure_goes_to_its_kind_and_labels_only() -> None:
    metrics = Metrics("m")
    metrics.count("k3_nan_rows_total", 2)
    metrics.set("k3_pages", 3, {"state": "free"})
    metrics.observe("k3_step_seconds", 0.02, {"phase": "decode"})
    found = samples(metrics.render().decode())
    assert found["k3_nan_rows_total{model=m}"] == 2
    assert found["k3_pages{model=m,state=free}"] == 3
    assert found["k3_step_seconds_count{model=m,phase=decode}"] == 1
    assert found["k3_step_seconds_bucket{le=0.01,model=m,phase=decode}"] == 0
    assert found["k3_step_seconds_bucket{le=0.025,model=m,phase=decode}"] == 1
    assert found["k3_grammar_compile_seconds_count{model=m}"] == 0  # known before the first
    with pytest.raises(KeyError):
        metrics.count("k3_pages", 1, {"state": "free"})
    with pytest.raises(ValueError, match="label"):
        metrics.set("k3_pages", 1, {"colour": "red"})


def test_a_timer_reports_latencies_tokens_and_one_outcome() -> None:
    metrics, now = Metrics("m"), [10.0]
    handle = EventStream("r", 3000)  # of the class for more than 2048 tokens
    timer = RequestTimer(metrics, Request((1,) * 3000), handle, lambda: now[0])
    for at, reason in ((10.5, None), (10.75, None), (12.0, "stop")):
        now[0] = at
        timer.see(Event(7, -0.1, (), 0, reason))
    timer.end()  # an abort after the end changes nothing
    found = samples(metrics.render().decode())
    assert found["k3_requests_total{class=medium,model=m,outcome=stop}"] == 1
    assert sum(v for k, v in found.items() if k.startswith("k3_requests_total")) == 1
    assert found["k3_ttft_seconds_sum{class=medium,model=m}"] == 0.5
    assert found["k3_itl_seconds_sum{class=medium,model=m}"] == 1.5
    assert found["k3_itl_seconds_count{class=medium,model=m}"] == 2
    assert found["k3_e2e_seconds_sum{class=medium,model=m}"] == 2.0
    assert found["k3_prompt_tokens_total{class=medium,model=m}"] == 3000
    assert found["k3_generation_tokens_total{class=medium,model=m}"] == 3


def test_a_timer_without_a_last_event_counts_an_abort() -> None:
    metrics = Metrics("m")
    timer = RequestTimer(metrics, Request((1,)), EventStream("r", 1))
    timer.see(Event(7, -0.1, (), 0))
    timer.end()
    timer.end()
    timer.see(Event(7, -0.1, (), 0, "stop"))
    assert metrics.value("k3_requests_total", {"outcome": "abort"}) == 1
    assert metrics.value("k3_requests_total") == 1
    assert metrics.value("k3_generation_tokens_total") == 1


def test_the_collector_adds_what_is_new_of_the_engines_sums() -> None:
    counters = CacheCounters(lookup_tokens=40, hit_tokens=10)
    cache = CacheStats(8, 5, 2, 1, 3, counters)
    stats = Stats(4, 2, 0, 0, 0, 0, 0)
    engine = SimpleNamespace(stats=lambda: stats, cache_stats=lambda: cache, num_restarts=1)
    metrics = Metrics("m", has_vllm_names=True)
    collect = EngineCollector(engine, metrics)  # type: ignore[arg-type]
    metrics.before_scrape(collect)
    metrics.render()
    counters.hit_tokens = 25
    found = samples(metrics.render().decode())
    assert found["k3_state_hit_tokens_total{model=m}"] == 25
    assert found["k3_preemptions_total{class=all,model=m}"] == 3
    assert found["k3_engine_restarts_total{model=m}"] == 1
    assert found["vllm:num_requests_running{model_name=m}"] == 2
    assert found["vllm:num_requests_waiting{model_name=m}"] == 4
    assert found["vllm:kv_cache_usage_perc{model_name=m}"] == 2 / 8
    assert found["vllm:prefix_cache_queries_total{model_name=m}"] == 40
    assert found["vllm:prefix_cache_hits_total{model_name=m}"] == 25
    counters.hit_tokens = 5  # the index began anew
    metrics.render()
    assert metrics.value("k3_state_hit_tokens_total") == 30


def test_requests_over_http_are_counted(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    assert api.chat().status_code == 200
    assert api.chat(stream=True).status_code == 200
    engine.scripts = [Script(error="the logits are not finite")]
    assert api.chat().status_code == 500
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    assert api.chat(messages=[{"role": "user", "content": [image]}]).status_code == 400
    response = api.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(response.text)
    label = "class=short,model=scripted"
    num_tokens = len(script(ANSWER))
    assert found[f"k3_requests_total{{{label},outcome=stop}}"] == 2
    assert found[f"k3_requests_total{{{label},outcome=error}}"] == 1
    assert found[f"k3_generation_tokens_total{{{label}}}"] == 2 * num_tokens
    assert found[f"k3_reasoning_tokens_total{{{label}}}"] == 2 * len("hm")
    assert found[f"k3_ttft_seconds_count{{{label}}}"] == 2
    assert found[f"k3_itl_seconds_count{{{label}}}"] == 2 * (num_tokens - 1)
    assert found["k3_media_rejected_total{model=scripted,reason=image}"] == 1
    prompts = sum(len(request.token_ids) for request in engine.requests)
    assert found[f"k3_prompt_tokens_total{{{label}}}"] == prompts
    assert "vllm:" not in response.text


def test_the_names_of_vllm_come_on_request(engine, tokenizer, api_of) -> None:  # type: ignore[no-untyped-def]
    settings = replace(Settings(), has_vllm_names=True)
    text = (
        api_of(create_app(engine, tokenizer, "scripted", settings)).request("GET", "/metrics").text
    )
    assert set(re.findall(r"^vllm:\w+", text, re.MULTILINE)) == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    }
