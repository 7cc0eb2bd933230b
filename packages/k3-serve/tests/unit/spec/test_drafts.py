"""What the drafts propose, against searches and forwards that are written down plainly."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.engine import Request, Sampling
from k3_core.errors import K3Error
from k3_core.model import SequenceBatch
from k3_serve.engine.request import RequestState
from k3_serve.spec import NgramDraft
from k3_serve.spec import ngram as ngram_module
from k3_serve.spec.pace import MAX_PAUSE, Pace
from k3_serve.testing import GuessDraft, SteppedEngine, tiny_model

GREEDY = Sampling(max_tokens=24, temperature=0)
PROMPT = tuple(range(30, 71))
CONTENT = "what a request holds"


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_mtp_layers=1)


def lookup(rows, limit, shortest, longest):
    """The latest of the longest matches, by trying every place of every length."""
    for length in range(min(longest, len(rows) - 1), shortest - 1, -1):
        for end in range(len(rows) - 2, length - 2, -1):
            if rows[end + 1 - length : end + 1] == rows[-length:]:
                followed = list(rows[end + 1 :])
                while len(followed) < limit:
                    followed += rows[end + 1 :]
                return followed[:limit]
    return []


@given(
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40), max_size=4),
    limit=st.integers(1, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_the_index_finds_what_a_search_finds(rows, cuts, limit, shortest, more):
    draft = NgramDraft(shortest, shortest + more)
    ngram_module_places, ngram_module.MAX_PLACES = ngram_module.MAX_PLACES, 100
    try:
        request = RequestState("a", [], "short")
        for cut in sorted({min(cut, len(rows)) for cut in cuts} | {len(rows)}):
            request.rows = rows[:cut]
            (got,) = draft.propose([(request, limit)])
            assert got == lookup(request.rows, limit, shortest, shortest + more)
    finally:
        ngram_module.MAX_PLACES = ngram_module_places


def test_a_step_indexes_new_rows_only_and_a_huge_prompt_its_end(monkeypatch):
    monkeypatch.setattr(ngram_module, "MAX_ROWS", 50)
    draft, request = NgramDraft(), RequestState("a", [1, 2, 3, 4, *range(10, 200)], "short")
    request.rows += [1, 2, 3]
    assert draft.propose([(request, 4)]) == [[]], "the match is too far in front"
    request.rows += [190, 191, 192]
    assert draft.propose([(request, 9)]) == [[*range(193, 200), 1, 2]]
    places = draft._places[request]
    assert len(places._before) == 49 + 3
    draft.forget(request)
    assert not draft._places
    with pytest.raises(ValueError, match="matches of 4 to 3 tokens"):
        NgramDraft(4, 3)


def test_the_pace_grows_follows_and_backs_off():
    pace = Pace(4)
    assert pace.limit() == 4
    pace.learn(4, 1)
    assert pace.limit() == 2
    pace.learn(2, 2)
    assert pace.limit() == 4
    pauses = []
    while len(pauses) < 10:
        waited = 0
        while not (limit := pace.limit()):
            waited += 1
        pauses.append(waited)
        pace.learn(limit, 0)
    assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 32, MAX_PAUSE]
    while not pace.limit():
        pass
    pace.learn(1, 1)
    assert pace.limit() == 2
    pace.learn(2, 2)
    assert pace.limit() == 4


@torch.inference_mode()
def chain(model, rows, limit):
    """Guesses of the MTP layer by whole passes over the sequence: mix from the model, then own."""
    mix_TD = model.forward_packed(
        torch.tensor(rows[:-1]), SequenceBatch.from_lengths([len(rows) - 1])
    ).mix_TD
    following, guesses = list(rows[1:]), []
    for _ in range(limit):
        batch = SequenceBatch.from_lengths([len(following)])
        logits, hidden_TD = model.mtp_forward(torch.tensor(following), mix_TD, batch)
        guesses.append(int(logits[-1].argmax()))
        following.append(guesses[-1])
        mix_TD = torch.cat((mix_TD, hidden_TD[-1:]))
    return guesses


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_mtp_proposes_what_whole_passes_say(model, draft_tokens):
    """Prompts in several chunks, requests that come and go, spans that are mostly rejected."""
    engine = SteppedEngine(
        model, num_pages=300, max_batch=2, token_budget=66, draft="mtp", draft_tokens=draft_tokens
    )
    drafter, seen = engine._speculation._drafter, []
    propose = drafter.propose

    def spy(asked):
        drafts = propose(asked)
        for (request, limit), draft in zip(asked, drafts, strict=True):
            seen.append(len(draft))
            assert draft == chain(model, request.rows, limit)
        return drafts

    drafter.propose = spy
    prompts = [PROMPT * 2, PROMPT[:5], PROMPT[3:20], (9,) * 33]
    short = replace(GREEDY, max_tokens=12)
    answers = engine.answer([Request(prompt, short) for prompt in prompts])
    assert all(len(answer.token_ids) == 12 for answer in answers)
    assert len(seen) > 12 and min(seen) > 0


def test_mtp_goes_on_behind_a_hit_and_after_other_work(model):
    """What it has not seen is missing from its latents; that costs accepted tokens only."""
    engine = SteppedEngine(model, unit=4, num_pages=300, draft="mtp", draft_max_requests=2)
    (first,) = engine.answer([Request(PROMPT, GREEDY)])
    requests = [Request(PROMPT, replace(GREEDY, max_tokens=6 * k)) for k in range(1, 5)]
    for answer in engine.answer(requests):
        assert answer.token_ids == first.token_ids[: len(answer.token_ids)]
    last = engine.plans[-1].decodes
    assert len(last) == 1 and engine.cache_stats().counters.hit_tokens > 0


def test_only_few_requests_draft_together(model):
    draft = GuessDraft(lambda rows, limit: [0] * limit)
    engine = SteppedEngine(model, num_pages=300, draft=draft, draft_max_requests=2)
    engine.answer([Request(PROMPT[:n], replace(GREEDY, max_tokens=4 * n)) for n in (2, 3, 4)])
    spans = Counter()
    for plan in engine.plans:
        assert len(plan.decodes) <= 2 or not any(one.draft for one in plan.decodes)
        spans[len(plan.decodes)] += any(one.draft for one in plan.decodes)
    assert spans[1] and spans[2]


def test_drafts_leave_room_for_a_unit_of_prompt(model):
    draft = GuessDraft(lambda rows, limit: [0] * limit)
    engine = SteppedEngine(model, unit=16, num_pages=300, draft=draft, token_budget=24)
    engine.answer([Request(PROMPT[n:], GREEDY) for n in range(4)])
    for plan in engine.plans:
        assert plan.num_tokens <= 24
        assert sum(one.num_tokens for one in plan.decodes) <= max(8, len(plan.decodes))
    assert any(one.draft for plan in engine.plans for one in plan.decodes)


class Counts:
    def __init__(self):
        self.values = Counter()

    def count(self, name, amount=1.0, labels=None):
        self.values[name] += amount

    def observe(self, name, value, labels=None):
        self.values[name] += 1

    def set(self, name, value, labels=None):
        self.values[name] = value


def test_drafted_and_accepted_tokens_are_counted_for_all_and_for_each(model):
    (answer,) = SteppedEngine(model, num_pages=300).answer([Request(PROMPT[:8], GREEDY)])
    truth = (*PROMPT[:8], *answer.token_ids)

    def guess(rows, limit):
        """Right but for the last token of a draft."""
        tokens = list(truth[len(rows) : len(rows) + limit])
        return [*tokens[:-1], tokens[-1] ^ 1]

    counts = Counts()
    engine = SteppedEngine(model, num_pages=300, draft=GuessDraft(guess), observer=counts)
    handle = engine.submit(Request(PROMPT[:8], GREEDY))
    engine.run()
    spans = [len(one.draft) for plan in engine.plans for one in plan.decodes if one.draft]
    accepted = sum(spans) - len(spans)
    # Every step gives a token beside the accepted ones.
    assert accepted == 24 - len(engine.plans) > 0
    assert counts.values["k3_spec_drafted_total"] == sum(spans)
    assert counts.values["k3_spec_accepted_total"] == accepted
    assert counts.values["k3_spec_replay_seconds"] == len(spans)
    assert handle.cache_report["spec_drafted"] == sum(spans)
    assert handle.cache_report["spec_accepted"] == accepted


@pytest.mark.parametrize("broken", ["propose", "observe"])
def test_a_draft_that_raises_is_left_out_and_no_request_fails(model, broken, monkeypatch, caplog):
    (wanted,) = SteppedEngine(model, num_pages=300).answer([Request(PROMPT, GREEDY)])
    engine = SteppedEngine(model, num_pages=300, draft="mtp")

    def fail(*arguments):
        raise RuntimeError(CONTENT)

    monkeypatch.setattr(engine._speculation._drafter, broken, fail)
    (answer,) = engine.answer([Request(PROMPT, GREEDY)])
    assert answer.token_ids == wanted.token_ids and engine.num_restarts == 0
    assert not any(one.draft for plan in engine.plans for one in plan.decodes)
    assert "no more drafts after RuntimeError" in caplog.text and CONTENT not in caplog.text


def test_what_cannot_draft_is_refused_by_name(model):
    with pytest.raises(K3Error, match="draft 'eagle' is not one of ngram, mtp"):
        SteppedEngine(model, num_pages=300, draft="eagle")
    with pytest.raises(K3Error, match=r"num_nextn_predict_layers is 0.*draft ngram"):
        SteppedEngine(tiny_model(), num_pages=300, draft="mtp")
    with pytest.raises(K3Error, match="draft_tokens is 0"):
        SteppedEngine(model, num_pages=300, draft="ngram", draft_tokens=0)
