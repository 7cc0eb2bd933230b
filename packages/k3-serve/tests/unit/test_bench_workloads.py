"""Workloads: the same seed the same load, exact sizes, histories that only grow."""

from __future__ import annotations

import itertools

import pytest

from k3_serve.bench import workloads


def _make(name: str, seed: int) -> workloads.Workload:
    if name == "agent":
        return workloads.agent(seed, num_sessions=3, num_turns=5, output_tokens=4, concurrency=2)
    if name == "shared-prefix":
        return workloads.shared_prefix(
            seed, num_prefixes=2, num_warm=3, prefix_tokens=100, new_tokens=7, output=4
        )
    if name == "burst":
        return workloads.burst(
            seed, num_requests=20, rate=5.0, output_tokens=4, name="x", has_burst=True
        )
    return workloads.synthetic(
        seed, num_requests=6, prompt_tokens=9, output_tokens=4, rate=2.0, name="x"
    )


@pytest.mark.parametrize("name", ["synthetic", "shared-prefix", "agent", "burst"])
def test_a_seed_decides_everything(name) -> None:  # type: ignore[no-untyped-def]
    assert _make(name, 3) == _make(name, 3)
    assert _make(name, 3) != _make(name, 4)


def test_synthetic_has_the_sizes_and_arrivals_asked_for() -> None:
    load = workloads.synthetic(
        1, num_requests=4, prompt_tokens=9, output_tokens=5, rate=2.0, is_poisson=False
    )
    assert [session.at for session in load.sessions] == [0.5, 1.0, 1.5, 2.0]
    bodies = [call.body for session in load.sessions for call in session.calls]
    assert [len(body["prompt"]) for body in bodies] == [9] * 4
    assert {body["max_tokens"] for body in bodies} == {5}
    closed = workloads.synthetic(1, num_requests=4, prompt_tokens=9, output_tokens=5, concurrency=3)
    assert [session.at for session in closed.sessions] == [0.0] * 4 and closed.concurrency == 3


def test_poisson_arrivals_have_their_rate() -> None:
    times = workloads.arrivals(0, 20_000, 4.0, True)
    assert times == sorted(times)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # Of an exponential distribution the deviation is the mean; 20,000 draws are within 3%.
    assert mean == pytest.approx(0.25, rel=0.03) and variance**0.5 == pytest.approx(0.25, rel=0.03)


def test_a_prefix_is_shared_and_the_rest_is_not() -> None:
    load = _make("shared-prefix", 0)
    assert load.num_calls == 2 * (1 + 1 + 3) and load.concurrency == 1
    for session in load.sessions:
        prompts = [call.body["prompt"] for call in session.calls]
        assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
        assert len({tuple(prompt[100:]) for prompt in prompts}) == 5
        assert [call.group for call in session.calls] == ["cold", "second"] + ["warm"] * 3
    first, other = (session.calls[0].body["prompt"][:100] for session in load.sessions)
    assert first != other


def test_a_burst_changes_nothing_but_the_long_requests() -> None:
    both = [
        workloads.burst(
            7, num_requests=20, rate=5.0, output_tokens=4, name=name, has_burst=has_burst
        )
        for name, has_burst in (("alone", False), ("beside", True))
    ]
    alone, beside = (load.sessions for load in both)
    assert [one.at for one in alone] == [one.at for one in beside[:20]]
    long = beside[20:]
    assert [len(one.calls[0].body["prompt"]) for one in long] == [8_000] * 8
    assert {one.at for one in long} == {10.0}
    prompts = {tuple(one.calls[0].body["prompt"]) for load in both for one in load.sessions}
    assert len(prompts) == 48  # nothing of the first run helps the second


def test_an_agents_history_grows_and_answers_every_call() -> None:
    for session in _make("agent", 0).sessions:
        histories = [call.body["messages"] for call in session.calls]
        for before, after in itertools.pairwise(histories):
            assert after[: len(before)] == before and len(after) > len(before)
        open_calls: list[str] = []
        for message in histories[-1]:
            if message["role"] == "tool":
                assert open_calls.pop() == message["tool_call_id"]
            open_calls += [call["id"] for call in message.get("tool_calls", ())]
        assert not open_calls
        assert {message["role"] for message in histories[-1]} >= {"user", "assistant", "tool"}
