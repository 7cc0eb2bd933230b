"""Whatever the cache went through, the answer is the cold one (serving 9f, P2).

The oracle is one forward pass of the same model over the whole sequence, without any cache.
Tiers hold a few prefixes; their copies end late, and files are damaged in between.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3_core.engine import Request, Sampling, Suspended
from k3_core.model import SequenceBatch
from k3_serve.spec import NgramDraft
from k3_serve.testing import GuessDraft, SteppedEngine, tiny_model

UNIT = 4
TRUNKS = (tuple(range(20, 60)), (*range(20, 32), *range(100, 130)), (7,) * 40)
"""Prompts begin with a piece of one of these: shared, parting after 12 tokens, repetitive."""


@dataclass(frozen=True)
class Turn:
    """A request: when it comes, what it asks, and what happens to it."""

    trunk: int
    shared: int
    tail: tuple[int, ...]
    max_tokens: int
    priority: int
    delay: int
    fate: str
    fate_step: int
    continues: bool
    before: str
    damage: str
    which: int


turns = st.builds(
    Turn,
    trunk=st.integers(0, len(TRUNKS) - 1),
    shared=st.one_of(st.just(40), st.integers(1, 40)),
    tail=st.lists(st.integers(0, 255), max_size=6).map(tuple),
    max_tokens=st.integers(1, 16),
    priority=st.sampled_from([0, 0, 0, 1]),
    delay=st.integers(0, 3),
    fate=st.sampled_from(["end", "end", "end", "suspend", "abort", "score"]),
    fate_step=st.integers(1, 8),
    continues=st.booleans(),
    before=st.sampled_from(["nothing", "nothing", "squeeze", "squeeze", "restart"]),
    damage=st.sampled_from(["none", "none", "none", "flip", "cut", "delete"]),
    which=st.integers(0, 99),
)
engines = st.fixed_dictionaries(
    {
        "max_batch": st.integers(2, 4),
        "page_tokens": st.sampled_from([UNIT, 2 * UNIT, 4 * UNIT]),
        "token_budget": st.sampled_from([8, 12, 20, 64]),
        "spare_pages": st.integers(0, 24),
        "cpu_prefixes": st.sampled_from([8, 3, 1, 0]),
        "disk_prefixes": st.sampled_from([8, 2, 0]),
        "io_steps": st.sampled_from([0, 0, 1, 3]),
        "draft": st.sampled_from([None, "ngram", "mtp", "nearly right"]),
        "draft_tokens": st.integers(1, 5),
    }
)
OUTCOMES: Counter[str] = Counter()
"""How many answers of all histories were restored, by tier."""


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_mtp_layers=1)


@pytest.fixture(scope="module")
def cold(model):
    """Logits of every position of a sequence, from one pass without a cache."""
    known = {}

    def logits(ids):
        if ids not in known:
            batch = SequenceBatch.from_lengths([len(ids)])
            with torch.inference_mode():
                known[ids] = model.forward_packed(torch.tensor(ids), batch).logits
        return known[ids]

    return logits


@pytest.fixture(scope="module")
def greedy(model):
    """What an engine without drafts answers: guesses, so that drafts are accepted too."""
    engine, known = SteppedEngine(model, unit=UNIT, num_pages=2_000), {}

    def answer(request):
        key = (request.token_ids, request.sampling.max_tokens)
        if key not in known:
            known[key] = engine.answer([request])[0].token_ids
        return known[key]

    return answer


class History:
    """Plays turns against an engine and checks every token against the cold model."""

    def __init__(self, model, cold, greedy, options, folder):
        options = dict(options)
        self.greedy, self.guesses = None, []
        if options["draft"] == "nearly right":
            options["draft"], self.greedy = GuessDraft(self.guess), greedy
        elif options["draft"] == "ngram":
            options["draft"] = NgramDraft(1, 3)  # random text repeats single tokens at most
        spare, page_tokens = options.pop("spare_pages"), options["page_tokens"]
        cpu, disk = options.pop("cpu_prefixes"), options.pop("disk_prefixes")
        self.io_steps = options.pop("io_steps")
        probe = SteppedEngine(model, unit=UNIT, num_pages=400, page_tokens=page_tokens)
        layout = probe._runner.layout
        extent = layout.checkpoint_pages
        num_pages = -(-64 // page_tokens) + 2 * extent + 1 + spare
        size = layout.row_bytes + 4096 + 8 * (layout.page_bytes + 512)
        self.folder = folder if disk else None
        options |= {
            "cpu_cache_bytes": cpu * size,
            "disk_cache": self.folder,
            "disk_cache_bytes": disk * size,
        }
        self.options = {"unit": UNIT, "num_pages": num_pages, **options}
        self.model, self.num_steps = model, 0
        self.start()
        self.cold, self.answers = cold, []
        self.open = []

    def start(self):
        self.engine = SteppedEngine(self.model, **self.options)
        self.engine.is_io_held = self.io_steps > 0

    def finish(self):
        while self.step():
            pass

    def close(self):
        """The end of an engine; its files stay."""
        self.finish()
        if self.engine._tiers is not None:
            self.engine._tiers.close()
            self.engine.run()
        stats = self.engine.cache_stats()
        assert stats.num_active == stats.num_restoring == 0
        assert stats.num_free + stats.num_cached == stats.num_pages

    def prepare(self, turn):
        """What happens to the caches before a turn: they must lie below, or start anew."""
        if turn.before == "restart":
            self.close()
            self.start()
        elif turn.before == "squeeze":
            index = self.engine._scheduler.index
            with torch.inference_mode():
                index.release(index.allocate(index.pool.num_free + index.pool.num_cached))
        if self.folder is not None and turn.damage != "none":
            self.damage(turn)

    def play(self, turns):
        for turn in turns:
            self.prepare(turn)
            for _ in range(turn.delay):
                self.step()
            self.submit(turn)
        self.finish()

    def damage(self, turn):
        """Somebody spoils a file of the cache."""
        files = [f for f in sorted(self.folder.glob("*.*")) if f.stat().st_size]
        if not files:
            return
        file = files[turn.which % len(files)]
        data = bytearray(file.read_bytes())
        if turn.damage == "delete":
            file.unlink()
            return
        at = turn.which * 7919 % len(data)
        data[at] ^= 0x10
        file.write_bytes(data if turn.damage == "flip" else data[:at])

    def submit(self, turn):
        prompt = (*TRUNKS[turn.trunk][: turn.shared], *turn.tail)
        if turn.continues and self.answers:
            prompt = (*self.answers[-1], *turn.tail, 5)[-40:]
        sampling = Sampling(
            max_tokens=turn.max_tokens,
            temperature=0,
            has_prompt_logprobs=turn.fate == "score",
        )
        request = Request(prompt, sampling, priority=turn.priority)
        if self.greedy is not None:
            self.guesses.append((*prompt, *self.greedy(request)))
        self.open.append([turn, Suspended(request, ()), self.engine.submit(request), 0])

    def copy(self):
        """The copies of the tiers go on by one, every so many steps."""
        self.num_steps += 1
        if self.engine._tiers is not None and self.num_steps % (self.io_steps + 1) == 0:
            self.engine.reader.run(1)
            self.engine.writer.run(1)

    def guess(self, rows, limit):
        """The greedy answer, with every fifth place wrong."""
        for ids in self.guesses:
            if list(ids[: len(rows)]) == rows:
                tokens = enumerate(ids[len(rows) : len(rows) + limit], len(rows))
                return [token if place % 5 else token ^ 1 for place, token in tokens]
        return []

    def step(self):
        self.copy()
        went_on = self.engine.step()
        for entry in list(self.open):
            turn, state, handle, age = entry
            entry[3] = age + 1
            is_due = age + 1 == turn.fate_step
            if is_due and turn.fate == "abort":
                self.engine.abort(handle)
                self.engine.run_commands()
            elif is_due and turn.fate == "suspend" and handle in self.handles():
                taken = Suspended.from_json(self.engine.suspend_now(handle).to_json())
                self.check(state, handle)
                entry[1], entry[2] = taken, self.engine.resume(taken)
                went_on = True
                continue
            if handle not in self.handles() and self.engine._commands.empty():
                self.check(state, handle)
                self.open.remove(entry)
        return went_on or bool(self.open)

    def handles(self):
        return [sequence.handle for sequence in self.engine._sequences()]

    def check(self, state, handle):
        events = list(handle)
        assert events[-1].finish_reason != "error", events[-1].error
        tokens = tuple(e.token_id for e in events if e.token_id is not None)
        before = (*state.request.token_ids, *state.generated)
        ids = (*before, *tokens)
        expected = self.cold(ids)
        rows = self.engine.rows.get(handle.request_id, [])
        assert len(rows) == len(tokens)
        for index, row in enumerate(rows):
            position = len(before) - 1 + index
            torch.testing.assert_close(row, expected[position], atol=1e-9, rtol=0)
            assert tokens[index] == int(expected[position].argmax())
        if handle.prompt_logprobs is not None:
            scores = expected.log_softmax(-1)
            for position, token in enumerate(handle.prompt_logprobs[1:]):
                value = float(scores[position, ids[position + 1]])
                assert token.logprob == pytest.approx(value, abs=1e-9)
        assert handle.num_cached_tokens % UNIT == 0
        assert handle.num_cached_tokens < len(before)
        OUTCOMES[handle.cache_report.get("tier", "none")] += 1
        self.answers.append(ids)


def play(model, cold, greedy, options, script):
    with TemporaryDirectory() as folder:
        history = History(model, cold, greedy, options, Path(folder))
        history.play(script)
        history.close()


quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
slow = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(options=engines, script=st.lists(turns, min_size=1, max_size=7))
def test_every_history_gives_the_cold_answers(model, cold, greedy, options, script):
    play(model, cold, greedy, options, script)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@slow
@given(options=engines, script=st.lists(turns, min_size=1, max_size=10))
def test_many_histories_give_the_cold_answers(model, cold, greedy, options, script):
    play(model, cold, greedy, options, script)
