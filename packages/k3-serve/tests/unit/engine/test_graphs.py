"""Decode steps on static inputs, recorded and replayed: the same logits."""

import pytest
import torch

from k3_core.engine import Request, Sampling
from k3_core.ops import OpSet
from k3_serve.engine.graphs import FEWEST_COLUMNS, DecodeGraphs, unsafe_ops
from k3_serve.testing import SteppedEngine, tiny_model

MODEL = tiny_model()
UNIT = 16


def engine(model=MODEL, has_graphs=True, **options):
    made = SteppedEngine(model, max_batch=6, unit=UNIT, num_pages=200, token_budget=64, **options)
    runner = made._runner
    runner._graphs = DecodeGraphs(model, runner.cache, 6) if has_graphs else None
    return made


def requests(lengths, max_tokens=12):
    return [
        Request(
            tuple((7 * i + t) % 200 for t in range(length)),
            Sampling(temperature=0.0, max_tokens=max_tokens),
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("lengths", [(1,), (3, 40, 17), (5, 6, 7, 8, 9, 33)])
def test_static_steps_give_the_logits_of_ordinary_ones(lengths):
    with_graphs, without = engine(), engine(has_graphs=False)
    answers = [one.answer(requests(lengths)) for one in (with_graphs, without)]
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert with_graphs._runner._graphs._graphs
    rows = zip(with_graphs.rows.values(), without.rows.values(), strict=True)
    for own, expected in rows:
        torch.testing.assert_close(torch.stack(own), torch.stack(expected), rtol=0, atol=1e-9)


def test_buckets_of_rows_and_columns():
    made = engine()
    made.answer(requests((4, 4, 4), max_tokens=5))
    graphs = made._runner._graphs
    assert set(graphs._graphs) == {(3, FEWEST_COLUMNS)}
    long = requests((UNIT * FEWEST_COLUMNS - 2,), max_tokens=6)
    made.answer(long)
    assert set(graphs._graphs) == {(3, 16), (1, 16), (1, 32)}


def test_a_longest_sequence_that_is_no_power_of_two_of_pages():
    made = engine(max_length=20 * UNIT)
    made.answer(requests((19 * UNIT,), max_tokens=UNIT - 1))
    assert set(made._runner._graphs._graphs) == {(1, 20)}


def test_prefills_and_scored_prompts_run_as_they_are():
    made = engine()
    sampling = Sampling(temperature=0.0, max_tokens=1, has_prompt_logprobs=True)
    made.answer([Request((1, 2, 3), sampling)])
    assert not made._runner._graphs._graphs


def test_ops_that_wait_for_the_host_are_named():
    assert "rms_norm.cpu" in unsafe_ops(OpSet.resolve(overrides={"kernel.rms_norm": "cpu"}))
    assert not unsafe_ops(MODEL.ops)


def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch, caplog):
    made, plain = engine(), engine(has_graphs=False)
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *_: 1 / 0)
    expected = plain.answer(requests((3, 17)))
    assert [a.token_ids for a in made.answer(requests((3, 17)))] == [a.token_ids for a in expected]
    assert made._runner._graphs is None
    assert "without graphs from now on: ZeroDivisionError" in caplog.text


def test_graphs_can_be_prepared_and_their_refusal_is_no_error(monkeypatch, caplog):
    made = engine()
    made._runner.prepare()
    prepared = made._runner._graphs._graphs
    assert set(prepared) == {(rows, FEWEST_COLUMNS) for rows in range(1, made._num_slots + 1)}
    answer = made.answer(requests((5,)))[0]
    assert answer.token_ids == engine(has_graphs=False).answer(requests((5,)))[0].token_ids
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *_: 1 / 0)
    other = engine()
    other._runner.prepare()
    assert other._runner._graphs is None and "ZeroDivisionError" in caplog.text
    other._runner.prepare()
