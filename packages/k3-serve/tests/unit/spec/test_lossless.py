"""With any draft the answers are those without: tokens, log-probabilities, ends, checkpoints."""

from dataclasses import replace

import pytest
import torch

from k3_core.engine import Request, Sampling, SimpleEngine, Suspended, fold_events
from k3_serve.engine.paged import PagedCache
from k3_serve.testing import GuessDraft, SteppedEngine, tiny_model

GREEDY = Sampling(max_tokens=21, temperature=0)
SAMPLED = Sampling(max_tokens=21, temperature=0.8, top_p=0.9, seed=11)
PROMPT = tuple(range(30, 71))
PROMPTS = ((7,) * 20, PROMPT, (5, 6, 7) * 9, (1,))


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_mtp_layers=1)


@pytest.fixture(scope="module")
def plain(model):
    """Answers without drafts and without a paged cache, kept by what was asked."""
    known = {}

    def answers(prompts, sampling, **options):
        key = (prompts, repr(sampling))
        if key not in known:
            with SimpleEngine(model, **options) as engine:
                known[key] = engine.generate([Request(p, sampling) for p in prompts])
        return known[key]

    return answers


def oracle(*known):
    """Guesses the truth: what follows the rows in the known sequences."""

    def guess(rows, limit):
        for ids in known:
            if ids[: len(rows)] == tuple(rows):
                return list(ids[len(rows) : len(rows) + limit])
        return []

    return guess


def wrong(guess):
    """Guesses what is never drawn: the truth, moved by one."""
    return lambda rows, limit: [(token + 1) % 256 for token in guess(rows, limit)]


def noisy(guess, period=3):
    """Every third place is wrong."""

    def shaken(rows, limit):
        tokens = guess(rows, limit)
        return [t if (len(rows) + i) % period else t ^ 1 for i, t in enumerate(tokens)]

    return shaken


def whole(prompts, answers):
    return [(*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        assert one.finish_reason == other.finish_reason
        for top, other_top in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert [token for token, _ in top] == [token for token, _ in other_top]


def idle(engine):
    stats = engine.cache_stats()
    return stats.num_active == 0 and stats.num_free + stats.num_cached == stats.num_pages


@pytest.mark.parametrize("unit", [4, 64])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["ngram", "mtp", "right", "noisy", "wrong"])
def test_tokens_are_the_same_with_and_without(model, plain, draft, sampling, unit):
    sampling = replace(sampling, top_logprobs=2)
    wanted = plain(PROMPTS, sampling)
    truth = oracle(*whole(PROMPTS, wanted))
    made = {"right": truth, "noisy": noisy(truth), "wrong": wrong(truth)}.get(draft)
    engine = SteppedEngine(
        model, unit=unit, num_pages=300, draft=GuessDraft(made) if made else draft
    )
    got = engine.answer([Request(prompt, sampling) for prompt in PROMPTS])
    assert_same(got, wanted)
    assert idle(engine)
    spans = [one for plan in engine.plans for one in plan.decodes if one.draft]
    assert spans or draft == "ngram"
    again = engine.answer([Request((*PROMPT, *got[1].token_ids[:9]), replace(sampling))])
    assert again[0].token_ids[:12] == got[1].token_ids[9:], "what it saved is right"


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(1, 11), (2, 8), (4, 5), (7, 4)])
def test_a_draft_that_is_always_right_needs_as_few_steps_as_it_can(
    model, plain, num_tokens, num_steps
):
    """21 tokens: one of the prefill, then 1 + k a step."""
    wanted = plain((PROMPT[:8],), GREEDY)
    draft = GuessDraft(oracle(*whole((PROMPT[:8],), wanted)))
    engine = SteppedEngine(model, num_pages=300, draft=draft, draft_tokens=num_tokens)
    assert_same(engine.answer([Request(PROMPT[:8], GREEDY)]), wanted)
    assert len(engine.plans) == num_steps
    assert draft.num_drafted == 21 - num_steps


def test_a_draft_that_is_always_wrong_costs_no_step_and_few_rows(model, plain):
    wanted = plain((PROMPT[:8],), GREEDY)
    draft = GuessDraft(wrong(oracle(*whole((PROMPT[:8],), wanted))))
    engine = SteppedEngine(model, num_pages=300, draft=draft)
    assert_same(engine.answer([Request(PROMPT[:8], GREEDY)]), wanted)
    assert len(engine.plans) == 21
    drafted = [len(one.draft) for plan in engine.plans for one in plan.decodes]
    # Halved down to one, then probes behind pauses of 1, 2, 4 and 8 steps.
    assert drafted == [4, 2, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_states_are_replayed_and_never_copied(model, plain, monkeypatch):
    wanted = plain((PROMPT[:8],), GREEDY)
    draft = GuessDraft(noisy(oracle(*whole((PROMPT[:8],), wanted))))
    engine = SteppedEngine(model, num_pages=300, draft=draft)
    for name in ("save", "restore", "store"):
        monkeypatch.setattr(PagedCache, name, None)  # one unit: there is nothing to save
    calls = {"kda_decode": [], "kda_replay": []}
    for name, seen in calls.items():
        op = getattr(model.ops, name)

        def spy(*args, _op=op, _seen=seen, **options):
            _seen.append(options)
            return _op(*args, **options)

        monkeypatch.setattr(model.ops, name, spy)
    pool = engine._runner.cache.kda_state(0)
    assert_same(engine.answer([Request(PROMPT[:8], GREEDY)]), wanted)
    spans = [one for plan in engine.plans for one in plan.decodes if one.draft]
    assert len(calls["kda_replay"]) == len(spans) > 3  # the model has one KDA layer
    assert len([c for c in calls["kda_decode"] if c["writes_BWHV"] is not None]) == len(spans)
    for options in (*calls["kda_decode"], *calls["kda_replay"]):
        assert options["state_SHVK"].data_ptr() == pool.data_ptr()
        assert options["state_SHVK"].shape == pool.shape


def test_an_end_inside_a_span_is_the_end(model, plain):
    (answer,) = plain((PROMPT,), GREEDY)
    stop_id = answer.token_ids[9]
    first = answer.token_ids.index(stop_id)
    truth = GuessDraft(oracle(*whole((PROMPT,), [answer])))
    sampling = replace(GREEDY, stop_ids=(stop_id,))
    engine = SteppedEngine(model, num_pages=300, draft=truth)
    (stopped,) = engine.answer([Request(PROMPT, sampling)])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == answer.token_ids[: first + 1] and idle(engine)
    for most in range(1, 8):
        (short,) = engine.answer([Request(PROMPT, replace(GREEDY, max_tokens=most))])
        assert short.token_ids == answer.token_ids[:most] and short.finish_reason == "length"


def test_a_stop_string_inside_a_span_is_the_end(model, plain, tokenizer):
    bias = dict.fromkeys(range(256, 512), -1e4)  # bytes only
    sampling = replace(GREEDY, logit_bias=bias)
    (answer,) = plain((PROMPT,), sampling)
    text = bytes(answer.token_ids)
    cut = bytes(answer.token_ids[7:9]).decode("latin-1")
    if not cut.isascii():
        at = next(i for i in range(6, 20) if max(answer.token_ids[i : i + 2]) < 128)
        cut = bytes(answer.token_ids[at : at + 2]).decode()
    sampling = replace(sampling, stop=(cut,))
    wanted = SteppedEngine(model, tokenizer, num_pages=300).answer([Request(PROMPT, sampling)])
    assert wanted[0].finish_reason == "stop" and len(wanted[0].token_ids) < len(text)
    truth = GuessDraft(oracle(*whole((PROMPT,), [answer])))
    engine = SteppedEngine(model, tokenizer, num_pages=300, draft=truth)
    assert_same(engine.answer([Request(PROMPT, sampling)]), wanted)
    assert idle(engine)


class Alternating:
    """Even and odd ids in turn, 13 of them; fails for a token that it does not allow."""

    def __init__(self, num_taken=0, fails_at=99):
        self.num_taken, self.fails_at = num_taken, fails_at

    @property
    def is_complete(self):
        return self.num_taken == 13

    def allowed_mask(self, vocab_size):
        return torch.arange(vocab_size) % 2 == self.num_taken % 2

    def advance(self, token_id):
        assert token_id % 2 == self.num_taken % 2
        self.num_taken += 1
        if self.num_taken == self.fails_at:
            raise ValueError("no more")

    def clone(self):
        return Alternating(self.num_taken, self.fails_at)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_constraint_holds_at_every_place_of_a_span(model, sampling):
    request = Request(PROMPT, sampling, constraint=Alternating())
    (wanted,) = SteppedEngine(model, num_pages=300).answer([request])
    assert len(wanted.token_ids) == 13 and wanted.finish_reason == "stop"
    for guess in (oracle((*PROMPT, *wanted.token_ids, 1, 2, 3)), lambda rows, limit: [8] * limit):
        engine = SteppedEngine(model, num_pages=300, draft=GuessDraft(guess))
        assert_same(engine.answer([request]), [wanted])
    broken = replace(request, constraint=Alternating(fails_at=6))
    bad, good = engine.answer([broken, Request(PROMPT[:9], GREEDY)])
    assert bad.finish_reason == "error" and "no more" in bad.error and idle(engine)
    assert good.finish_reason == "length"


class Cycle(Alternating):
    """The tokens 10 to 14 over and over: text that prompt lookup gets right."""

    def __init__(self, num_taken=0):
        self.num_taken = num_taken

    is_complete = False

    def allowed_mask(self, vocab_size):
        return torch.arange(vocab_size) == 10 + self.num_taken % 5

    def advance(self, token_id):
        assert token_id == 10 + self.num_taken % 5
        self.num_taken += 1

    def clone(self):
        return Cycle(self.num_taken)


def test_prompt_lookup_takes_a_period_in_few_steps(model):
    request = Request(PROMPT[:4], replace(GREEDY, max_tokens=48), constraint=Cycle())
    (wanted,) = SteppedEngine(model, num_pages=300).answer([request])
    assert wanted.token_ids == tuple(10 + i % 5 for i in range(48))
    engine = SteppedEngine(model, num_pages=300, draft="ngram")
    assert_same(engine.answer([request]), [wanted])
    # One of the prefill, seven until the last three stood before, then 5 a step.
    assert len(engine.plans) == 1 + 7 + 8 and idle(engine)


def test_a_row_that_is_not_finite_ends_its_request_there(model, plain, monkeypatch):
    wanted = plain((PROMPT, PROMPT[:9]), GREEDY)
    engine = SteppedEngine(
        model, num_pages=300, draft=GuessDraft(oracle(*whole((PROMPT, PROMPT[:9]), wanted)))
    )
    forward = type(model).forward_packed

    def patched(self, input_ids_T, batch, **options):
        output = forward(self, input_ids_T, batch, **options)
        if batch.is_verify:
            output.logits[2] = torch.nan  # the third row of the first request's span
        return output

    monkeypatch.setattr(type(model), "forward_packed", patched)
    handles = [engine.submit(Request(p, GREEDY)) for p in (PROMPT, PROMPT[:9])]
    while len(engine._sequences()) != 1:
        engine.step()
    monkeypatch.undo()
    engine.run()
    bad, good = (fold_events(list(handle)) for handle in handles)
    assert bad.finish_reason == "error" and "not finite" in bad.error
    assert bad.token_ids == wanted[0].token_ids[:3]  # one of the prefill and two of the span
    assert_same([good], [wanted[1]])
    assert idle(engine)


@pytest.mark.parametrize("draft", ["mtp", "noisy"])
def test_suspension_preemption_and_sleep_drop_drafts_and_nothing_else(model, plain, draft):
    wanted = plain((PROMPT,), GREEDY)
    truth = noisy(oracle(*whole((PROMPT,), wanted)))
    made = GuessDraft(truth) if draft == "noisy" else draft
    engine = SteppedEngine(model, unit=4, num_pages=300, max_batch=1, draft=made)
    handle, parts = engine.submit(Request(PROMPT, GREEDY)), []
    for number, act in enumerate(("suspend", "preempt", "sleep", "suspend")):
        for _ in range(2 + (number == 0)):
            engine.step()
        if act == "suspend":
            state = Suspended.from_json(engine.suspend_now(handle).to_json())
            parts += [event.token_id for event in handle if event.token_id is not None]
            handle = engine.resume(state)
        elif act == "preempt":
            engine.submit(Request(PROMPT[:3], replace(GREEDY, max_tokens=2), priority=1))
            while not engine.plans[-1].preempted:
                engine.step()
        else:
            engine._sleep()
            engine._wake()
            engine.spoil()
    engine.run()
    parts += [event.token_id for event in handle if event.token_id is not None]
    assert tuple(parts) == wanted[0].token_ids and idle(engine)
    assert not engine._speculation._tracks


def test_a_step_that_raises_because_of_a_draft_ends_no_request(model, plain, monkeypatch):
    prompts = (PROMPT, PROMPT[:9])
    wanted = plain(prompts, GREEDY)
    forward = type(model).forward_packed

    def patched(self, input_ids_T, batch, **options):
        if 255 in input_ids_T.tolist():
            raise RuntimeError("kernel fault")
        return forward(self, input_ids_T, batch, **options)

    monkeypatch.setattr(type(model), "forward_packed", patched)
    assert not any(255 in answer.token_ids for answer in wanted)
    for count in (1, 2):
        draft = GuessDraft(lambda rows, limit: [255] * limit)
        engine = SteppedEngine(model, num_pages=300, draft=draft)
        answers = engine.answer([Request(prompt, GREEDY) for prompt in prompts[:count]])
        assert_same(answers, wanted[:count])
        assert draft.num_drafted <= 4 * count and idle(engine)


def test_new_weights_void_what_a_draft_keeps(model):
    fresh = tiny_model(seed=1, num_mtp_layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = SteppedEngine(model, unit=4, num_pages=300, draft="mtp")
    try:
        handle = engine.submit(Request(PROMPT, GREEDY))
        for _ in range(4):
            engine.step()
        with torch.inference_mode():
            engine._update_weights(fresh.state_dict(), 3)
        engine.run()
        answer = fold_events(list(handle))
        old = answer.versions.count(0)
        with SimpleEngine(fresh) as simple:
            (rest,) = simple.generate(
                [Request((*PROMPT, *answer.token_ids[:old]), replace(GREEDY, max_tokens=21 - old))]
            )
        assert 0 < old < 21 and answer.token_ids[old:] == rest.token_ids
    finally:
        model.load_state_dict(before)
