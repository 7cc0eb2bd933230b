"""The simple engine against straight-line generation by the same fake model."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from k3_core.engine import Completion, Images, Request, Sampling, SimpleEngine, Suspended
from k3_core.engine.sampling import choose_rows

GREEDY = Sampling(max_tokens=6, temperature=0)


def straight(model, prompt: list[int], sampling: Sampling, num_tokens: int) -> list[int]:  # type: ignore[no-untyped-def]
    """The tokens that generation without an engine, a cache or a batch gives."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids += choose_rows(model.row(ids)[None], [sampling], [len(ids)], [None])
    return ids[len(prompt) :]


@pytest.fixture
def engine(fake_model, letters):  # type: ignore[no-untyped-def]
    with SimpleEngine(fake_model, letters, max_batch=3, prefill_chunk=4) as engine:
        yield engine


def request(prompt: list[int], **fields: object) -> Request:
    return Request(tuple(prompt), replace(GREEDY, **fields))  # type: ignore[arg-type]


def test_many_requests_in_few_slots_equal_single_ones(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    prompts = [[i, *range(i)] for i in range(9)]
    samplings = [
        replace(GREEDY, temperature=i % 2, seed=i, top_p=0.9, max_tokens=3 + i) for i in range(9)
    ]
    requests = [Request(tuple(p), s) for p, s in zip(prompts, samplings, strict=True)]
    completions = engine.generate(requests)
    for prompt, sampling, completion in zip(prompts, samplings, completions, strict=True):
        expected = straight(fake_model, prompt, sampling, sampling.max_tokens or 0)
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == "length"
    assert max(fake_model.batch_sizes) == 3


def test_logprobs_of_output_and_prompt_equal_a_full_forward(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    (done,) = engine.generate([request(prompt, has_prompt_logprobs=True, top_logprobs=2)])
    ids = [*prompt, *done.token_ids]
    rows = torch.stack([fake_model.row(ids[: i + 1]) for i in range(len(ids))]).log_softmax(-1)
    expected = [float(rows[i - 1, ids[i]]) for i in range(1, len(ids))]
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    got = [t.logprob for t in done.prompt_logprobs[1:] if t] + list(done.logprobs)
    assert got == pytest.approx(expected, abs=1e-6)
    best = [row.argmax().item() for row in rows[len(prompt) - 1 : -1]]
    assert [top[0][0] for top in done.top_logprobs] == best


def test_no_tokens_but_a_scored_prompt(engine) -> None:  # type: ignore[no-untyped-def]
    (done,) = engine.generate([request([1, 2, 3], max_tokens=0, has_prompt_logprobs=True)])
    assert (done.token_ids, done.finish_reason) == ((), "length")
    assert [t and t.token_id for t in done.prompt_logprobs] == [None, 2, 3]


def test_stop_ids_and_strings_end_with_their_token(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    tokens = straight(fake_model, [1, 2], GREEDY, 6)
    (by_id,) = engine.generate([request([1, 2], stop_ids=(tokens[2],))])
    text = "".join(chr(ord("a") + i) for i in tokens)
    (by_text,) = engine.generate([request([1, 2], stop=(text[2:4],))])
    assert (by_id.token_ids, by_id.finish_reason) == (tuple(tokens[:3]), "stop")
    assert (by_text.token_ids, by_text.finish_reason) == (tuple(tokens[:4]), "stop")


def test_without_a_limit_the_context_is_filled(engine) -> None:  # type: ignore[no-untyped-def]
    (done,) = engine.generate([request([1] * 60, max_tokens=None)])
    assert (len(done.token_ids), done.finish_reason) == (4, "length")


def test_without_a_limit_a_long_context_gives_the_default_length(engine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("k3_core.engine.threaded.DEFAULT_MAX_TOKENS", 3)
    (done,) = engine.generate([request([1] * 10, max_tokens=None)])
    assert (len(done.token_ids), done.finish_reason) == (3, "length")


def test_nan_and_exceptions_fail_one_request_only(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    fake_model.bad_ids, fake_model.raising_ids = {38}, {37}
    prompts = [[1, 2], [38, 2], [37, 2], [2, 3]]
    good = [straight(fake_model, p, GREEDY, 6) for p in (prompts[0], prompts[3])]
    done = engine.generate([request(p, logit_bias={37: -99, 38: -99}) for p in prompts])
    assert [list(done[0].token_ids), list(done[3].token_ids)] == good
    assert (done[1].finish_reason, done[1].error) == ("error", "the logits are not finite")
    assert (done[2].finish_reason, done[2].error) == ("error", "RuntimeError: kernel fault")
    engine.close()  # the counters lag the last events by a step
    stats = engine.stats()
    assert (stats.num_failed, stats.num_finished, stats.num_running) == (2, 4, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request(()), "prompt is empty"),
        (Request((40,)), "token id 40 is outside"),
        (Request((-1,)), "token id -1 is outside"),
        (Request((1,), Sampling(logit_bias={99: 1.0})), "logit_bias id 99"),
        (Request((1,) * 65), "exceed the context of 64"),
        (Request((1,) * 10, Sampling(max_tokens=55)), "10 tokens and 55 more"),
    ],
)
def test_requests_that_can_never_run_are_refused(engine, bad: Request, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        engine.submit(bad)


def test_images_expand_and_count(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    images = Images(torch.zeros(12, 3, 14, 14), torch.tensor([[1, 2, 6]]))
    handle = engine.submit(replace(request([1, 7, 2]), images=images))
    tokens = [event.token_id for event in handle]
    assert handle.num_prompt_tokens == 5
    assert tokens[:2] == straight(fake_model, [1, 39, 39, 39, 2], GREEDY, 2)


def pause_after(model, num_forwards: int) -> tuple[threading.Event, threading.Event]:  # type: ignore[no-untyped-def]
    """Stops the model before its n-th forward; set the second event to let it go on."""
    reached, go = threading.Event(), threading.Event()
    countdown = iter(range(num_forwards, -1, -1))

    def gate() -> None:
        if next(countdown, -1) == 0:
            reached.set()
            assert go.wait(10)

    model.gate = gate
    return reached, go


def suspend_midway(engine, model, item: Request) -> tuple[list[int], Suspended]:  # type: ignore[no-untyped-def]
    reached, go = pause_after(model, 3)
    handle = engine.submit(item)
    assert reached.wait(10)
    result: list[Suspended] = []
    thread = threading.Thread(target=lambda: result.append(engine.suspend(handle)))
    thread.start()
    go.set()
    thread.join(10)
    events = list(handle)
    assert events[-1].finish_reason == "suspended"
    return [e.token_id for e in events if e.token_id is not None], result[0]


def test_suspend_and_resume_elsewhere_give_the_same_tokens(engine, fake_model, letters) -> None:  # type: ignore[no-untyped-def]
    item = request([5, 6], temperature=1.0, seed=11, max_tokens=20)
    expected = straight(fake_model, [5, 6], item.sampling, 20)
    first, suspended = suspend_midway(engine, fake_model, item)
    assert 0 < len(first) < 20
    restored = Suspended.from_json(suspended.to_json())
    with SimpleEngine(fake_model, letters) as other:
        rest = [event.token_id for event in other.resume(restored)]
    assert first + rest == expected


def test_an_unseeded_request_keeps_its_seed_over_suspension(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    first, suspended = suspend_midway(engine, fake_model, request([5], temperature=1, max_tokens=9))
    rest = [event.token_id for event in engine.resume(suspended)]
    assert first + rest == straight(fake_model, [5], suspended.request.sampling, 9)


def test_suspended_json_keeps_every_field() -> None:
    images = Images(torch.randn(4, 3, 2, 2), torch.tensor([[1, 2, 2]]))
    sampling = Sampling(3, 0.5, 0.9, -4, (1, 2), ("x", "y"), {7: -1.5}, 2, True)
    item = Request((1, 2), sampling, images, "think", "high", 2, "batch")
    back = Suspended.from_json(Suspended(item, (8, 9)).to_json())
    assert (back.generated, back.request.sampling) == ((8, 9), sampling)
    assert back.request.images is not None
    assert torch.equal(back.request.images.pixel_values, images.pixel_values)
    assert torch.equal(back.request.images.grid_thws, images.grid_thws)
    assert replace(back.request, images=images).__dict__ == item.__dict__
    with pytest.raises(ValueError, match="format 1"):
        Suspended.from_json("{}")


def test_new_weights_apply_to_requests_in_flight(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    reached, go = pause_after(fake_model, 3)
    handle = engine.submit(request([4, 2], max_tokens=8))
    assert reached.wait(10)
    update = threading.Thread(target=engine.update_weights, args=({"weight": torch.ones(1)}, 7))
    update.start()
    go.set()
    update.join(10)
    events = list(handle)
    old = sum(event.version == 0 for event in events)
    assert [event.version for event in events] == [0] * old + [7] * (8 - old)
    assert 0 < old < 8
    ids = [4, 2, *(event.token_id for event in events[:old])]
    assert [e.token_id for e in events[old:]] == straight(fake_model, ids, GREEDY, 8 - old)


def test_bad_weights_change_nothing(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    for tensors, message in (
        ({"weight": torch.ones(1), "other": torch.ones(1)}, "no weight is called 'other'"),
        ({"weight": torch.ones(2)}, r"shape \(2,\), not \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(tensors, 1)
    assert fake_model.weight.item() == 0
    assert engine.stats().version == 0


def test_abort_ends_waiting_and_running_requests(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    reached, go = pause_after(fake_model, 2)
    handles = [engine.submit(request([i], max_tokens=50)) for i in range(5)]
    assert reached.wait(10)
    for handle in (handles[0], handles[4]):
        engine.abort(handle)
    go.set()
    ends = [list(handle)[-1].finish_reason for handle in handles]
    assert ends == ["abort", "length", "length", "length", "abort"]
    engine.abort(handles[1])  # has ended: nothing to do
    with pytest.raises(ValueError, match="has ended"):
        engine.suspend(handles[1])


def test_higher_priority_is_served_first(fake_model) -> None:  # type: ignore[no-untyped-def]
    reached, go = pause_after(fake_model, 1)
    with SimpleEngine(fake_model, max_batch=1) as engine:
        handles = [engine.submit(request([1]))]
        assert reached.wait(10)
        for priority in (0, 5, 2):
            prompt = request([10 + priority])
            handles.append(engine.submit(replace(prompt, priority=priority)))
        go.set()
        for handle in handles:
            list(handle)
    assert fake_model.begun == [1, 15, 12, 10]


def test_async_consumers_share_one_loop(engine, fake_model) -> None:  # type: ignore[no-untyped-def]
    async def collect(prompt: list[int]) -> list[int]:
        return [event.token_id async for event in engine.submit(request(prompt))]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(collect([i, i]) for i in range(5)))

    assert asyncio.run(main()) == [straight(fake_model, [i, i], GREEDY, 6) for i in range(5)]


def test_closing_ends_everything(fake_model) -> None:  # type: ignore[no-untyped-def]
    reached, go = pause_after(fake_model, 1)
    engine = SimpleEngine(fake_model, max_batch=1)
    handles = [engine.submit(request([1], max_tokens=60)) for _ in range(2)]
    assert reached.wait(10)
    closer = threading.Thread(target=engine.close)
    closer.start()
    go.set()
    closer.join(10)
    assert [list(handle)[-1].finish_reason for handle in handles] == ["abort", "abort"]
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(request([1]))


def test_completion_is_plain_data(engine) -> None:  # type: ignore[no-untyped-def]
    (done,) = engine.generate([request([1])])
    assert isinstance(done, Completion)
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 6
