"""The continuous engine on a tiny float64 model: the protocol, the cache, and who fails."""

from dataclasses import replace

import pytest
import torch

from k3_core.config import K3Config
from k3_core.config.vision import VisionConfig
from k3_core.engine import (
    EngineBusy,
    Images,
    Request,
    Sampling,
    SimpleEngine,
    Suspended,
    fold_events,
)
from k3_core.model import K3ForConditionalGeneration
from k3_serve.engine.classes import CLASSES
from k3_serve.engine.core import ContinuousEngine
from k3_serve.testing import GuessDraft, SteppedEngine, tiny_model

GREEDY = Sampling(max_tokens=12, temperature=0)
PROMPT = tuple(range(30, 71))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def engine(model):
    return SteppedEngine(model, unit=4, num_pages=300, max_batch=8, token_budget=24)


def idle(engine):
    stats = engine.cache_stats()
    return stats.num_active == 0 and stats.num_free + stats.num_cached == stats.num_pages


def test_the_thread_answers_like_the_simple_engine(model):
    requests = [
        Request(PROMPT[:n], Sampling(max_tokens=8, temperature=t, seed=n, top_p=0.9))
        for n, t in ((1, 0.0), (4, 1.0), (13, 0.7), (41, 1.3))
    ]
    with SimpleEngine(model) as simple, ContinuousEngine(model, unit=4, num_pages=300) as engine:
        wanted, got = simple.generate(requests), engine.generate(requests)
        assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
        for one, other in zip(got, wanted, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        assert idle(engine) and engine.stats().num_finished == 4


def test_alone_and_in_a_batch_of_eight_the_tokens_are_the_same(model, engine):
    sampled = Sampling(max_tokens=10, temperature=1.0, seed=4)
    requests = [Request((k, *PROMPT[: 5 * k]), s) for k in range(1, 5) for s in (GREEDY, sampled)]
    together = engine.answer(requests)
    assert max(len(plan.slices) for plan in engine.plans) >= 5
    for request, answer in zip(requests, together, strict=True):
        alone = SteppedEngine(model, unit=4, num_pages=300)
        assert alone.answer([request])[0].token_ids == answer.token_ids


def test_the_second_turn_of_a_conversation_hits_the_first(engine):
    (first,) = engine.answer([Request(PROMPT, GREEDY)])
    handle = engine.submit(Request((*PROMPT, *first.token_ids, 5, 6, 7), GREEDY))
    engine.run()
    assert handle.num_cached_tokens == (41 + 12 - 1) // 4 * 4
    again = engine.submit(Request(PROMPT, GREEDY))
    engine.run()
    assert again.num_cached_tokens == 40
    assert fold_events(list(again)).token_ids == first.token_ids


def test_salts_versions_and_prompt_logprobs_never_hit(model, engine):
    def cached(**fields):
        handle = engine.submit(Request(PROMPT, **{"sampling": GREEDY, **fields}))
        engine.run()
        return handle.num_cached_tokens

    assert [cached(), cached()] == [0, 40]
    assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, 40]
    assert cached(sampling=replace(GREEDY, has_prompt_logprobs=True)) == 0
    engine._update_weights({}, 7)
    assert [cached(), cached()] == [0, 40]


def test_prompt_logprobs_come_with_a_full_pass(model, engine):
    scored = replace(GREEDY, has_prompt_logprobs=True, max_tokens=1)
    (answer,) = engine.answer([Request(PROMPT, scored)])
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    got = [token.logprob for token in answer.prompt_logprobs[1:]]
    wanted = [float(expected[i, PROMPT[i + 1]]) for i in range(40)]
    assert got == pytest.approx(wanted, abs=1e-9)


def test_a_prompt_alone_ends_by_length_without_a_token(engine):
    (answer,) = engine.answer([Request(PROMPT, Sampling(max_tokens=0))])
    assert answer.finish_reason == "length" and answer.token_ids == () and idle(engine)


def test_suspended_requests_continue_elsewhere(model, engine):
    (whole,) = engine.answer([Request(PROMPT, GREEDY)])
    handle = engine.submit(Request(PROMPT, GREEDY))
    for _ in range(5):
        engine.step()
    state = Suspended.from_json(engine.suspend_now(handle).to_json())
    assert idle(engine) and list(handle)[-1].finish_reason == "suspended"
    assert state.generated == whole.token_ids[: len(state.generated)] != ()
    elsewhere = SteppedEngine(model, unit=8, num_pages=200)
    rest = elsewhere.resume(state)
    elsewhere.run()
    tokens = tuple(event.token_id for event in list(rest))
    assert state.generated + tokens == whole.token_ids
    with pytest.raises(ValueError, match="has ended"):
        engine.suspend_now(handle)


def test_new_weights_continue_what_runs_as_a_prompt(engine, model):
    fresh = tiny_model(seed=1)
    tensors = {name: value.clone() for name, value in fresh.state_dict().items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        handle = engine.submit(Request(PROMPT, GREEDY))
        for _ in range(5):
            engine.step()
        with torch.inference_mode():
            engine._update_weights(tensors, 3)
        engine.run()
        answer = fold_events(list(handle))
        assert answer.versions[0] == 0 and answer.versions[-1] == 3
        old = answer.versions.count(0)
        (rest,) = SteppedEngine(fresh, unit=4, num_pages=300).answer(
            [Request((*PROMPT, *answer.token_ids[:old]), replace(GREEDY, max_tokens=12 - old))]
        )
        assert answer.token_ids[old:] == rest.token_ids
        with pytest.raises(ValueError, match="no weight is called 'nope'"):
            engine._update_weights({"nope": torch.zeros(1)}, 9)
        assert engine.stats().version == 3
    finally:
        model.load_state_dict(before)


def test_a_sleeping_engine_holds_no_cache_and_goes_on_after_waking(engine):
    (whole,) = engine.answer([Request(PROMPT, GREEDY)])
    handle = engine.submit(Request(PROMPT, GREEDY))
    for _ in range(4):
        engine.step()
    engine._sleep()
    assert not engine.step() and engine.cache_stats().num_free == 300
    with pytest.raises(AssertionError, match="closed"):
        engine._runner.cache  # noqa: B018
    engine._wake()
    engine.spoil()
    engine.run()
    assert fold_events(list(handle)).token_ids == whole.token_ids and idle(engine)


def poisoned(model, monkeypatch, token_id, act):
    """Calls `act(logits)` for forwards that see a token id."""
    forward = type(model).forward_packed

    def patched(self, input_ids_T, batch, **options):
        output = forward(self, input_ids_T, batch, **options)
        if token_id in input_ids_T.tolist():
            act(output)
        return output

    monkeypatch.setattr(type(model), "forward_packed", patched)


def test_a_request_that_makes_steps_raise_is_found_and_ends_alone(model, engine, monkeypatch):
    good = [Request((k, *PROMPT[:20]), GREEDY) for k in range(3)]
    wanted = [answer.token_ids for answer in engine.answer(good)]

    def fail(output):
        raise RuntimeError("kernel fault")

    other = SteppedEngine(model, unit=4, num_pages=300, token_budget=64)
    poisoned(model, monkeypatch, 255, fail)
    *answers, bad = other.answer([*good, Request((*PROMPT[:9], 255, 3), GREEDY)])
    assert bad.finish_reason == "error" and "kernel fault" in bad.error
    assert [answer.token_ids for answer in answers] == wanted
    assert idle(other) and other.stats().num_failed == 1


def test_rows_that_are_not_finite_fail_alone_and_leave_nothing(model, engine, monkeypatch):
    forward = type(model).forward_packed

    def patched(self, input_ids_T, batch, **options):
        output = forward(self, input_ids_T, batch, **options)
        if 255 in input_ids_T.tolist() and output.logits is not None and len(output.logits):
            output.logits[-1] = torch.nan
        return output

    monkeypatch.setattr(type(model), "forward_packed", patched)
    request = Request((*PROMPT[:12], 255, 3, 4, 5), GREEDY)
    good, bad = engine.answer([Request(PROMPT[:3], GREEDY), request])
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error" and "not finite" in bad.error
    again = engine.submit(request)
    engine.run()
    assert again.num_cached_tokens == 0 and idle(engine)


def test_a_full_queue_refuses_its_class_only(model):
    classes = tuple(replace(c, queue_tokens=100) for c in CLASSES)
    engine = SteppedEngine(model, unit=4, num_pages=300, classes=classes)
    engine.submit(Request(PROMPT, GREEDY))
    with pytest.raises(EngineBusy, match="queue of short requests holds 53 of 100") as caught:
        engine.submit(Request(PROMPT, GREEDY))
    assert caught.value.request_class == "short" and caught.value.retry_after >= 1
    engine.submit(Request(PROMPT, GREEDY, request_class="long"))
    engine.run()
    engine.submit(Request(PROMPT, GREEDY))


def test_requests_that_never_fit_are_refused_at_once(model):
    engine = SteppedEngine(model, unit=4, num_pages=60)
    room = engine.max_length
    assert room < 200
    with pytest.raises(ValueError, match=f"exceed the context of {room}"):
        engine.submit(Request(PROMPT, Sampling(max_tokens=room)))
    handle = engine.submit(Request(PROMPT, replace(GREEDY, max_tokens=room - len(PROMPT))))
    engine.run()
    assert len(list(handle)) == room - len(PROMPT) and idle(engine)
    with pytest.raises(ValueError, match="hold no request beside two checkpoints"):
        SteppedEngine(model, unit=4, num_pages=20)


VISION = VisionConfig(
    vt_hidden_size=32,
    vt_num_hidden_layers=1,
    vt_num_attention_heads=2,
    vt_intermediate_size=32,
    qkv_hidden_size=32,
    mm_hidden_size=32,
    text_hidden_size=64,
    init_pos_emb_height=8,
    init_pos_emb_width=8,
)


@pytest.fixture(scope="module")
def seeing():
    config = replace(K3Config.preset("k3-test"), vision=VISION, is_flat=False)
    text = replace(config.text, max_position_embeddings=512)
    return K3ForConditionalGeneration(
        replace(config, text=text),
        dtype=torch.float64,
        impl_overrides={"kernel.kda_chunk": "kda_chunk.reference"},
        generator=torch.Generator().manual_seed(0),
    )


def pictures(seed, *grids):
    patches = sum(h * w for h, w in grids)
    pixels = torch.randn(patches, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    return Images(pixels, torch.tensor([(1, h, w) for h, w in grids]))


@pytest.mark.parametrize("draft", [None, GuessDraft(lambda rows, limit: [3] * limit)])
def test_images_expand_hit_by_content_and_fail_alone(seeing, draft):
    pad = seeing.config.media_placeholder_token_id
    prompt = (1, 2, pad, 3, 4, pad, *range(5, 16))
    first, second = pictures(0, (4, 6), (2, 4)), pictures(1, (4, 6), (2, 4))
    with SimpleEngine(seeing) as simple:
        wanted = simple.generate([Request(prompt, GREEDY, images=i) for i in (first, second)])
    engine = SteppedEngine(seeing, unit=4, num_pages=300, token_budget=12, draft=draft)
    handles, answers = [], []
    for images in (first, second, first):
        handles.append(engine.submit(Request(prompt, GREEDY, images=images)))
        engine.run()
        answers.append(fold_events(list(handles[-1])))
    assert handles[0].num_prompt_tokens == 15 + 6 + 2
    assert [h.num_cached_tokens for h in handles] == [0, 0, 20]
    assert [a.token_ids for a in answers[:2]] == [w.token_ids for w in wanted]
    assert answers[2].token_ids == answers[0].token_ids
    two_for_one = Request(prompt[:5], GREEDY, images=first)
    bad, good = engine.answer([two_for_one, Request(PROMPT, GREEDY)])
    assert bad.finish_reason == "error" and "placeholders" in bad.error
    assert good.finish_reason == "length" and idle(engine)
