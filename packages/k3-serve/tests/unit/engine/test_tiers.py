"""The engine with tiers: what is evicted comes back, and whatever fails is computed again."""

import errno
import threading
import time
from dataclasses import replace

import pytest
import torch

from k3_core.engine import Request, Sampling, fold_events
from k3_core.errors import K3Error
from k3_serve.cache.tiers import disk as disk_module
from k3_serve.cache.tiers.files import scan_file
from k3_serve.engine.core import ContinuousEngine
from k3_serve.ops.collect import EngineCollector
from k3_serve.ops.metrics import Metrics
from k3_serve.testing import SteppedEngine, tiny_model

GREEDY = Sampling(max_tokens=6, temperature=0)
PROMPTS = [tuple((17 * k + 3 * i * i + i) % 256 for i in range(40)) for k in range(5)]
LIMITS = {"unit": 4, "num_pages": 60, "max_batch": 3, "token_budget": 24}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def wanted(model):
    """Tokens of each prompt without any cache to hit."""
    cold = SteppedEngine(model, unit=4, num_pages=600)
    answers = cold.answer([Request(prompt, GREEDY) for prompt in PROMPTS])
    return {prompt: a.token_ids for prompt, a in zip(PROMPTS, answers, strict=True)}


@pytest.fixture
def metrics():
    return Metrics("tiny")


@pytest.fixture
def make(model, metrics, tmp_path):
    """An engine whose arena holds about one prompt, with files unless `disk` is false."""
    engines = []

    def build(disk=True, **options):
        options = {"cpu_cache_bytes": 2_000_000, **options}
        if disk:
            options.setdefault("disk_cache", tmp_path)
        engine = SteppedEngine(model, observer=metrics, **{**LIMITS, **options})
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine._tiers.close()


def ask(engine, prompt, **fields):
    handle = engine.submit(Request(prompt, GREEDY, **fields))
    engine.run()
    return handle, fold_events(list(handle))


def fill(engine, prompts=PROMPTS):
    """Answers all prompts, so that only the last ones stay in the arena."""
    for prompt in prompts:
        ask(engine, prompt)


def idle(engine):
    stats = engine.cache_stats()
    used = stats.num_active, stats.num_restoring
    return used == (0, 0) and stats.num_free + stats.num_cached == stats.num_pages


def fallbacks(metrics, reason):
    return metrics.value("k3_restore_fallback_total", {"reason": reason})


def files_only(make, **options):
    """An engine that finds the prompts in files and nowhere else."""
    first = make(**options)
    fill(first)
    first._tiers.close()
    return make(**options)


def test_what_the_arena_evicts_comes_back_from_host_memory(make, wanted, metrics):
    engine = make(disk=False)
    fill(engine)
    handle, answer = ask(engine, PROMPTS[0])
    assert answer.token_ids == wanted[PROMPTS[0]]
    report = handle.cache_report
    layout = engine._runner.layout
    assert handle.num_cached_tokens == report["state_hit"] == report["restored_tokens"] == 36
    assert report["restored_bytes"] == layout.row_bytes + 9 * layout.page_bytes
    assert report["tier"] == "cpu" and report["restore_ms"] > 0
    up = {"from": "cpu", "to": "device"}
    moved = "k3_cache_moved_bytes_total"
    assert metrics.value(moved, {"kind": "state", **up}) == layout.row_bytes
    assert metrics.value(moved, {"kind": "mla", **up}) == 9 * layout.page_bytes
    assert metrics.value("k3_tier_lookups_total", {"tier": "cpu", "result": "hit"}) == 1
    assert idle(engine)


def test_a_new_engine_restores_what_an_old_one_left_in_files(make, wanted, metrics):
    engine = files_only(make)
    for prompt in PROMPTS[:2]:
        handle, answer = ask(engine, prompt)
        assert answer.token_ids == wanted[prompt]
        assert handle.cache_report["tier"] == "disk" and handle.num_cached_tokens == 36
    EngineCollector(engine, metrics)()
    stats = {tier.tier: tier for tier in engine.cache_stats().tiers}
    for kind in ("state", "mla"):
        labels = {"kind": kind, "tier": "disk"}
        assert metrics.value("k3_cache_bytes", labels) == getattr(stats["disk"], f"{kind}_bytes")
        assert f'k3_cache_restore_seconds_count{{kind="{kind}",model="tiny",tier="disk"}} 2.0' in (
            metrics.render().decode()
        )
    assert idle(engine)


def test_a_longer_prefix_of_a_tier_adds_to_the_hit_of_the_arena(make):
    """Pages that the arena still has are kept, not read a second time."""
    engine = make(disk=False)
    long = (*PROMPTS[0], *PROMPTS[1][:20])
    ask(engine, PROMPTS[0])
    _, first = ask(engine, long)
    fill(engine, PROMPTS[2:])
    assert ask(engine, PROMPTS[0])[0].num_cached_tokens == 36
    handle, again = ask(engine, long)
    report, layout = handle.cache_report, engine._runner.layout
    assert report["state_hit"] == 56 and report["restored_tokens"] == 56 - 36
    assert report["restored_bytes"] == layout.row_bytes + (56 - 40) // 4 * layout.page_bytes
    assert again.token_ids == first.token_ids and idle(engine)


def damage(folder, pattern, act):
    files = sorted(folder.glob(pattern))
    assert files
    for file in files:
        act(file)


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def other_format(file):
    header, _ = scan_file(file)
    payload = file.read_bytes()[len(header.encode()) :]
    file.write_bytes(replace(header, format=2).encode() + payload)


def flip_header(file):
    data = bytearray(file.read_bytes())
    data[data.index(b'"num_tokens":') + 13] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("pattern", ["*.state", "*.latents"])
@pytest.mark.parametrize(
    ("reason", "act"),
    [
        ("short", lambda file: file.write_bytes(file.read_bytes()[:-7])),
        ("short", lambda file: file.write_bytes(file.read_bytes()[:100])),
        ("foreign", lambda file: file.write_bytes(b"")),
        ("checksum", flip),
        ("checksum", flip_header),
        ("foreign", other_format),
        ("missing", lambda file: file.unlink()),
    ],
)
def test_a_bad_file_is_computed_again_and_counted(
    make, wanted, metrics, tmp_path, pattern, reason, act
):
    engine = files_only(make)
    damage(tmp_path, pattern, act)
    handle, answer = ask(engine, PROMPTS[0])
    assert answer.token_ids == wanted[PROMPTS[0]] and handle.num_cached_tokens == 0
    assert "tier" not in handle.cache_report
    assert fallbacks(metrics, reason) == 1 and idle(engine)
    handle, answer = ask(engine, PROMPTS[1])
    assert answer.token_ids == wanted[PROMPTS[1]]
    assert engine.stats().num_failed == 0 and idle(engine)


def test_a_file_that_cannot_be_read_is_computed_again(make, wanted, metrics, monkeypatch):
    engine = files_only(make)

    def fail(*arguments):
        raise disk_module.BadFile("io", engine._tiers._disk._folder, "the disk is gone")

    monkeypatch.setattr(disk_module, "read_file", fail)
    handle, answer = ask(engine, PROMPTS[0])
    assert answer.token_ids == wanted[PROMPTS[0]] and handle.num_cached_tokens == 0
    assert fallbacks(metrics, "io") == 1 and idle(engine)


def test_an_unexpected_error_of_a_copy_is_computed_again(make, wanted, metrics, monkeypatch):
    engine = make(disk=False)
    fill(engine)
    monkeypatch.setattr(type(engine._tiers._host), "read_pages", None)
    _, answer = ask(engine, PROMPTS[0])
    assert answer.token_ids == wanted[PROMPTS[0]]
    assert fallbacks(metrics, "TypeError") == 1 and idle(engine)


def test_without_pages_for_a_restore_the_prompt_is_computed(make, wanted, metrics, monkeypatch):
    engine = make(disk=False)
    fill(engine)
    holder = engine.submit(Request(PROMPTS[4][:3], Sampling(max_tokens=60, temperature=0)))
    engine.step()
    taken = engine._scheduler.index.allocate(engine._scheduler.index.pool.num_free + 20)
    handle = engine.submit(Request(PROMPTS[0][:37], GREEDY))
    engine.step()
    engine._scheduler.index.release(taken)
    engine.run()
    assert len(list(handle)) == 6 and len(list(holder)) == 60 and idle(engine)
    assert engine.stats().num_failed == 0


def test_a_full_disk_is_counted_and_leaves_no_half_file(
    make, wanted, metrics, monkeypatch, tmp_path
):
    engine = make()

    def no_space(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("k3_serve.cache.tiers.files.os.replace", no_space)
    fill(engine, PROMPTS * 2)
    engine._tiers.close()
    assert metrics.value("k3_tier_dropped_total", {"tier": "disk", "reason": "io"}) > 0
    assert [file.name for file in tmp_path.iterdir()] == ["in-use"]
    monkeypatch.undo()
    _, answer = ask(engine, PROMPTS[0])
    assert answer.token_ids == wanted[PROMPTS[0]] and engine.stats().num_failed == 0


def test_others_go_on_while_a_restore_is_slow(make, wanted, metrics):
    engine = make(disk=False)
    fill(engine)
    engine.is_io_held = True
    slow = engine.submit(Request(PROMPTS[0], GREEDY))
    also = engine.submit(Request(PROMPTS[0], GREEDY))
    other = engine.submit(Request((9, 8, 7), GREEDY))
    engine.run()
    assert len(list(other)) == 6
    assert engine.stats().num_waiting == 2 and engine.stats().num_running == 0
    EngineCollector(engine, metrics)()
    assert metrics.value("k3_requests_restoring") == 2
    assert len(engine.reader.jobs) == 1, "both wait for the same restore"
    engine.reader.run()
    engine.run()
    for handle in (slow, also):
        assert handle.cache_report["restored_tokens"] == 36
        assert fold_events(list(handle)).token_ids == wanted[PROMPTS[0]]
    assert idle(engine)


def test_an_abort_while_restoring_frees_the_pages_at_once(make, wanted, metrics):
    engine = make(disk=False)
    fill(engine)
    engine.is_io_held = True
    handle = engine.submit(Request(PROMPTS[0], GREEDY))
    engine.run()
    assert not idle(engine)
    engine.abort(handle)
    engine.run_commands()
    assert idle(engine) and list(handle)[-1].finish_reason == "abort"
    before = engine._runner.cache.arena.bytes_PB.clone()
    engine.reader.run()
    engine.run()
    assert torch.equal(engine._runner.cache.arena.bytes_PB, before), "a late copy wrote nothing"
    assert fallbacks(metrics, "abandoned") == 1 and idle(engine)
    engine.is_io_held = False
    assert ask(engine, PROMPTS[0])[1].token_ids == wanted[PROMPTS[0]]


@pytest.mark.parametrize("what", ["weights", "sleep", "reset"])
def test_a_restore_under_way_does_not_outlive_its_cache(make, wanted, metrics, what):
    engine = make()
    fill(engine)
    engine.is_io_held = True
    handle = engine.submit(Request(PROMPTS[0], GREEDY))
    engine.run()
    with torch.inference_mode():
        if what == "weights":
            engine._update_weights({}, 4)
        elif what == "sleep":
            engine._sleep()
            engine._wake()
            engine.spoil()
        else:
            for sequence in engine._sequences():
                sequence.end("error", 0)
            engine._reset()
    assert idle(engine) and fallbacks(metrics, "cancelled") == 1
    engine.is_io_held = what == "weights"
    engine.run()
    answer = fold_events(list(handle))
    if what != "reset":
        assert answer.token_ids == wanted[PROMPTS[0]]
    assert handle.num_cached_tokens == (36 if what == "sleep" else 0)
    engine.is_io_held = False
    engine.run()
    assert ask(engine, PROMPTS[1])[1].token_ids == wanted[PROMPTS[1]] and idle(engine)


def test_other_weights_never_see_the_bytes_of_the_old(make, model, wanted, tmp_path):
    old = {name: value.clone() for name, value in model.state_dict().items()}
    new = {name: value.clone() for name, value in tiny_model(seed=1).state_dict().items()}
    engine = make(cpu_cache_bytes=200_000)
    fill(engine)
    engine.writer.run()
    assert list(tmp_path.glob("*.state"))
    try:
        with torch.inference_mode():
            engine._update_weights(new, 0)  # a version that does not rise is no excuse
        assert ask(engine, PROMPTS[0])[0].num_cached_tokens == 0
        engine._tiers.close()
        other = make()
        assert other.cache_stats().tiers[1].num_prefixes < len(list(tmp_path.glob("*.state")))
        (fresh,) = SteppedEngine(tiny_model(seed=1), unit=4, num_pages=600).answer(
            [Request(PROMPTS[1], GREEDY)]
        )
        handle, answer = ask(other, PROMPTS[1])
        assert handle.num_cached_tokens == 0 and answer.token_ids == fresh.token_ids
    finally:
        model.load_state_dict(old)


def test_another_tenant_finds_nothing(make):
    engine = make()
    fill(engine)
    assert ask(engine, PROMPTS[0], cache_salt="other")[0].num_cached_tokens == 0


def test_two_engines_do_not_share_a_folder(make, tmp_path):
    make()
    with pytest.raises(K3Error, match="is in use by another engine"):
        make()


def test_the_threads_restore_and_the_end_writes_what_is_left(model, wanted, tmp_path):
    """With real threads: restores under load, then a close in the middle of the writing."""
    options = {**LIMITS, "cpu_cache_bytes": 400_000, "disk_cache": tmp_path}
    for _ in range(2):
        with ContinuousEngine(model, **options) as engine:
            handles = [engine.submit(Request(p, GREEDY)) for p in PROMPTS * 3]
            for handle, prompt in zip(handles, PROMPTS * 3, strict=True):
                assert fold_events(list(handle)).token_ids == wanted[prompt]
        assert not any("tier" in t.name and t.is_alive() for t in threading.enumerate())
        assert list(tmp_path.glob("*.state")) and not list(tmp_path.glob("*.partial"))
    assert any(handle.cache_report.get("tier") for handle in handles)


def test_the_next_engine_begins_with_what_the_arena_of_the_last_one_held(model, wanted, tmp_path):
    options = {**LIMITS, "num_pages": 600, "disk_cache": tmp_path}
    for tier in (None, "disk"):
        with ContinuousEngine(model, **options) as engine:
            for prompt in PROMPTS:
                handle = engine.submit(Request(prompt, GREEDY))
                assert fold_events(list(handle)).token_ids == wanted[prompt]
                assert handle.cache_report.get("tier") == tier
                assert handle.num_cached_tokens == (36 if tier else 0)


def test_a_slow_writer_holds_nobody_up(model, wanted, tmp_path, monkeypatch, metrics):
    write = disk_module.write_file

    def slow(*arguments):
        time.sleep(0.002)
        return write(*arguments)

    monkeypatch.setattr(disk_module, "write_file", slow)
    options = {**LIMITS, "cpu_cache_bytes": 200_000, "disk_cache": tmp_path, "observer": metrics}
    with ContinuousEngine(model, **options) as engine:
        for prompt in PROMPTS * 2:
            assert engine.generate([Request(prompt, GREEDY)])[0].token_ids == wanted[prompt]
    dropped = metrics.value("k3_tier_dropped_total")
    assert dropped > 0 and list(tmp_path.glob("*.state"))
