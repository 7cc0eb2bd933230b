"""`k3 bench serve` on scripted answers: exact counts, failures, files; never a speed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

from k3_core.errors import K3Error
from k3_serve.bench.cli import app as command
from k3_serve.bench.client import Exchange, LoadClient, Record, read
from k3_serve.bench.figures import Figures, Spread
from k3_serve.bench.plans import Plan, window_of
from k3_serve.bench.workloads import Call, Workload, agent, synthetic
from k3_serve.testing import Script

TURN = "<|close|>think<|sep|><|open|>response<|sep|>four<|close|>response<|sep|><|end_of_msg|>"


@pytest.fixture(autouse=True)
def answers(engine) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [Script(list(b"abcdefgh"), spans=(1,))]
    engine.max_length = 20_000


def run(*arguments: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(command, ["serve", *arguments])


def test_counts_are_those_of_the_load(url, engine) -> None:  # type: ignore[no-untyped-def]
    load = synthetic(0, num_requests=5, prompt_tokens=11, output_tokens=4, concurrency=2)
    records = LoadClient(url).run(_in_bytes(load))
    assert [record.index for record in records] == list(range(5))
    (one,) = [Figures.of("x", "all", records)]
    assert (one.num_requests, one.num_errors) == (5, 0)
    assert (one.prompt_tokens, one.output_tokens) == (55, 20)
    assert all(0 <= record.ttft <= record.seconds for record in records)
    assert all(len(record.gaps) == 3 for record in records)
    assert len(engine.requests) == 5
    assert not any(request.sampling.stop_ids for request in engine.requests)


def _in_bytes(load):  # type: ignore[no-untyped-def]
    """The prompts in the vocabulary of the scripted server's tokenizer, which has 256 ids."""
    for session in load.sessions:
        for call in session.calls:
            call.body["prompt"] = [token_id % 256 for token_id in call.body["prompt"]]
    return load


def test_turns_of_a_session_follow_each_other(url, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(TURN)]
    load = agent(0, num_sessions=2, num_turns=4, output_tokens=99, concurrency=1)
    records = LoadClient(url).run(load)
    assert [record.group for record in records] == [f"turn {i}" for i in (1, 2, 3, 4)] * 2
    assert not any(record.error for record in records)
    begins = [record.begin for record in records]
    assert begins == sorted(begins)  # one session at a time, one turn after the other
    sizes = [len(request.token_ids) for request in engine.requests]
    assert [record.prompt_tokens for record in records] == sizes


def test_refused_and_broken_requests_are_errors(url, engine) -> None:  # type: ignore[no-untyped-def]
    load = _in_bytes(synthetic(0, num_requests=2, prompt_tokens=5, output_tokens=9, concurrency=1))
    load.sessions[0].calls[0].body["max_tokens"] = 30_000
    engine.scripts = [Script(list(b"ab"), error="the logits are not finite")]
    first, second = LoadClient(url).run(load)
    assert first.error.startswith("status 400") and "exceeds the context" in first.error
    assert second.error.startswith("broken off") and "not finite" in second.error
    one = Figures.of("x", "all", [first, second])
    assert (one.num_requests, one.num_errors, one.output_tokens) == (2, 2, 0)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(K3Error, match=r"names no model .* --url"):
        LoadClient("http://127.0.0.1:9").run(
            synthetic(0, num_requests=1, prompt_tokens=1, output_tokens=1, concurrency=1)
        )


@pytest.mark.parametrize(
    "pieces, problem",
    [
        ([b'data: {"choices": [{"text": "a"}]}\n\n'], "no end"),
        ([b"data: [DONE]\n\n"], "no text"),
        ([b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'], "no usage"),
        ([b"data: nonsense\n\n"], "Expecting value"),
    ],
)
def test_an_answer_that_is_no_stream_is_an_error(pieces, problem) -> None:  # type: ignore[no-untyped-def]
    call = Call("all", "/v1/completions", {})
    timed = [(float(i), piece) for i, piece in enumerate(pieces)]
    assert problem in read(Exchange(call, 0, 0.0, 9.0, 200, "", timed)).error


def test_times_are_those_of_the_bytes_however_they_are_cut() -> None:
    events = [b'data: {"choices": [{"text": "%c"}]}\n\n' % letter for letter in b"abc"]
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
    last = {"choices": [], "usage": usage, "k3_cache": {"mla_match": 5, "state_hit": 4}}
    tail = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    pieces = [(1.5, events[0] + events[1][:5]), (2.0, events[1][5:]), (4.0, events[2] + tail)]
    record = read(Exchange(Call("g", "/", {}), 3, 1.0, 5.0, 200, "", pieces))
    assert record == Record("g", 3, 1.0, 0.5, 4.0, (0.5, 2.0), 7, 3, 4, 5)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert Spread.of(range(1, 101)) == Spread(50.5, 95, 100)
    assert Spread.of(range(1, 22)) == Spread(11, 20, 21)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0) and Spread.of([]) == Spread()


def test_the_window_is_from_the_burst_to_the_end_of_its_last_request() -> None:
    times = [("short", 9.0), ("short", 10.5), ("short", 19.0), ("short", 31.0)]
    records = [_record(group, i, at, 1.0) for i, (group, at) in enumerate(times)]
    records += [_record("long", 4, 10.0, 5.0), _record("long", 5, 10.0, 20.0)]
    assert list(window_of(records)) == [1, 2]


def _record(group: str, index: int, begin: float, seconds: float) -> Record:
    return Record(group, index, begin, 0.1, seconds, (), 1, 1, 0, 0)


def test_burst_compares_the_same_requests() -> None:
    class Canned:
        def __init__(self) -> None:
            self.loads: list[Workload] = []

        def run(self, load):  # type: ignore[no-untyped-def]
            self.loads.append(load)
            slow = 3.0 if "burst" in load.name else 1.0
            calls = [(call, session.at) for session in load.sessions for call in session.calls]
            return [
                Record(c.group, i, at, slow, 30 * slow, (), 200, 16, 0, 0)
                for i, (c, at) in enumerate(calls)
            ]

    client = Canned()
    figures, ratios = Plan(seed=5, num_requests=100, rate=4.0).run("burst", client)  # type: ignore[arg-type]
    warm_up, alone, beside = client.loads
    assert (warm_up.num_calls, alone.num_calls, beside.num_calls) == (2, 100, 108)
    number = sum(session.at >= 10 for session in alone.sessions)
    assert ratios["of them in the window"] == number > 0
    assert ratios["the same of the 95th percentiles"] == pytest.approx(3.0)
    assert [one.num_requests for one in figures] == [100, 100, 8, number, number]


def test_the_command_prints_ratios_and_writes_the_file(url, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("k3_serve.bench.workloads.IDS", range(97, 123))
    file = tmp_path / "bench.json"
    sizes = ("--requests", "3", "--output-tokens", "8", "--prompt-tokens", "20")
    result = run("synthetic", "--url", url, *sizes, "--seed", "9", "--out", str(file))
    assert result.exit_code == 0, result.output
    assert "tokens/s at 8 over those at 1: " in result.output
    written = json.loads(file.read_text())
    assert (written["workload"], written["seed"], written["server"]) == (
        "synthetic",
        9,
        {"url": url},
    )
    assert {"date", "command", "machine", "versions", "ratios"} <= set(written)
    runs = [(one["run"], one["prompt_tokens"], one["output_tokens"]) for one in written["figures"]]
    assert runs == [("1 at a time", 60, 24), ("8 at a time", 60, 24)]


def test_the_command_compares_cold_and_warm(url, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("k3_serve.bench.workloads.IDS", range(97, 123))
    sizes = ("--prefix-tokens", "30", "--new-tokens", "4", "--prefixes", "2", "--requests", "3")
    result = run("shared-prefix", "--url", url, *sizes)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    counts = {row[1]: row[2:5] for row in rows if row and row[0] == "shared-prefix"}
    assert counts == {
        "cold": ["2", "0", "68"],
        "second": ["2", "0", "68"],
        "warm": ["6", "0", "204"],
    }
    assert "first token: cold over warm: " in result.output


def test_a_failed_request_is_exit_code_1_and_an_unknown_workload_an_error(url, engine) -> None:  # type: ignore[no-untyped-def]
    engine.max_length = 10
    result = run("agent", "--url", url, "--requests", "1", "--turns", "1")
    assert result.exit_code == 1 and "error: status 400" in result.output
    result = run("storm", "--url", url)
    assert isinstance(result.exception, K3Error) and "synthetic, shared-prefix" in str(
        result.exception
    )


def test_the_own_server_is_the_real_one() -> None:
    result = run("synthetic", "--requests", "2", "--output-tokens", "4", "--concurrency", "2")
    assert result.exit_code == 0, result.output
    (row,) = [line.split() for line in result.output.splitlines() if line.startswith("2 at")]
    assert row[4:9] == ["all", "2", "0", "400", "0"] and row[9] == "8"


@pytest.mark.multiproc
def test_the_own_server_ends_with_the_program_that_started_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "program.py"
    program.write_text(
        "from k3_serve.bench.server import OwnServer\n"
        "if __name__ == '__main__':\n"
        "    with OwnServer().running() as url:\n"
        "        print(url, flush=True)\n"
        "        input()\n"
    )
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        url = run.stdout.readline().strip()  # type: ignore[union-attr]
        assert httpx.get(f"{url}/health").status_code == 200
        run.kill()
    deadline = time.monotonic() + 30
    with pytest.raises(httpx.ConnectError):
        while time.monotonic() < deadline:
            httpx.get(f"{url}/health")
            time.sleep(0.1)
