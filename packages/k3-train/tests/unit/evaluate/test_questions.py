"""Suites of questions: what is right, what is asked, how figures are told apart."""

import random
import re

import pytest

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_train.data.long_context import FAMILIES, draw_item
from k3_train.evaluate import long_context
from k3_train.evaluate.base import Wanted
from k3_train.evaluate.few_shot import FAMILIES as SHORT
from k3_train.evaluate.few_shot import FewShotSuite
from k3_train.evaluate.long_context import LongContextSuite, draw_items, rank
from k3_train.evaluate.rows import open_suite
from k3_train.evaluate.scoring import joined, score
from k3_train.evaluate.tasks import TasksSuite

LENGTHS = {"needle": 600, "multi_key": 1200, "multi_hop": 1000, "state_retention": 1200}


def solution(items):
    answers = {item.prompt: item.answer for item in items}
    return answers.__getitem__


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spoil, right", [("", 2), ("7", 0)])
def test_only_the_exact_first_line_is_right(subject, answering, family, spoil, right):
    """An answer that goes on is another answer: 12 is not 123."""
    length = LENGTHS[family]
    depth = 0.5 if family == "needle" else None
    items = draw_items(subject, family, length, depth, 2, f"3:{family}:{length}:{depth}")
    asked = answering(lambda prompt: solution(items)(prompt) + spoil)
    suite = LongContextSuite((family,), (length,), (0.5,))
    results = list(suite.measure(subject, Wanted(seed=3, limit=2)))
    assert asked == [item.prompt for item in items]
    assert results[0].value == right / 2
    assert results[0].conditions["length"] == length
    assert [one.metric for one in results] == (
        ["accuracy"] if family == "needle" else ["accuracy", "choice_accuracy", "mean_rank"]
    )
    for item in items:
        used = 1 + len(subject.tokenizer.encode(item.prompt)) + long_context.ANSWER_TOKENS
        assert 0.85 * length <= used <= length


def test_the_needle_is_at_the_asked_depth(subject, answering):
    asked = answering(lambda prompt: "")
    suite = LongContextSuite(("needle",), (1000,))
    results = list(suite.measure(subject, Wanted(limit=2)))
    depths = [one.conditions["depth"] for one in results]
    assert depths == [0.0, 0.25, 0.5, 0.75, 1.0]
    for prompt, depth in zip(asked, [d for d in depths for _ in range(2)], strict=True):
        lines = prompt.partition("\n\nQuestion")[0].split("\n")[2:]
        (place,) = [i for i, line in enumerate(lines) if line.startswith("The code of")]
        assert place == round(depth * (len(lines) - 1))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"needle"}))
def test_distractors_are_wrong_and_of_the_same_form(family):
    for seed in range(30):
        item = draw_item(family, 5000, random.Random(seed))
        assert item.distractors and item.answer not in item.distractors
        assert len(set(item.distractors)) == len(item.distractors)
        form = re.sub(r"-?\d+", "N", item.answer)
        assert {re.sub(r"-?\d+", "N", one) for one in item.distractors} == {form}
        if family != "state_retention":
            assert all(code in item.prompt for one in item.distractors for code in one.split(", "))


def test_the_rank_counts_likelier_answers_with_their_ends(subject):
    (item,) = draw_items(subject, "state_retention", 1200, None, 1, "x")
    answers = [item.answer, *item.distractors]
    pieces = joined(subject, item.prompt, answers, is_ended=True)
    assert {piece.ids[-1] for piece in pieces} == {subject.tokenizer.eos_id}
    logprobs = [one.logprob for one in score(subject, pieces)]
    assert rank(subject, item) == 1 + sum(one >= logprobs[0] for one in logprobs[1:])


def test_lengths_follow_the_context_and_one_that_is_too_short_is_an_error_if_asked_for(
    subject, answering
):
    answering(lambda prompt: "")
    found = LongContextSuite(("needle",), depths=(1.0,)).measure(subject, Wanted(limit=1))
    assert [one.conditions["length"] for one in found] == [256]  # 32 to 128 bytes are too few
    for suite in (LongContextSuite(("multi_key",)), LongContextSuite(("needle",), (64,))):
        with pytest.raises(K3Error, match="needs a length of"):
            list(suite.measure(subject, Wanted(limit=1)))


@pytest.mark.parametrize("family", SHORT)
def test_few_shot_prompts_are_solved_by_their_answers(subject, answering, family):
    suite = FewShotSuite((family,), shots=2, size=4)
    items = suite.draw(family, 5, seed=1)
    assert items == suite.draw(family, 5, seed=1) != suite.draw(family, 5, seed=2)
    answering(lambda prompt: " " + dict(items)[prompt] + "\n\nInput")
    (result,) = suite.measure(subject, Wanted(seed=1, limit=5))
    assert (result.value, result.count) == (1.0, 5)
    assert result.low > 0.5 and result.high == 1.0
    for prompt, answer in items:
        questions = re.findall(r"Input: (.*)\nOutput:", prompt)
        assert len(set(questions)) == 3
        assert solve(family, questions[-1]) == answer


def solve(family, question):
    words = question.split()
    if family == "add":
        return str(int(words[0]) + int(words[2]))
    if family == "brackets":
        text = "".join(words[1:])
        while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
            text = shorter
        return " ".join(reversed(text.translate(str.maketrans("([{", ")]}"))))
    rest = words[1:]
    order = {"sort": sorted(rest, key=lambda one: int(one) if one.isdigit() else 0), "copy": rest}
    return " ".join(order.get(family, rest[::-1]))


def test_too_few_questions_for_the_shots_are_an_error():
    with pytest.raises(K3Error, match="has no 5 different questions"):
        FewShotSuite(size=1).draw("brackets", 1, 0)


def test_tasks_have_a_row_for_each_effort_with_the_same_questions(subject, monkeypatch):
    seen = []

    def count_right(questions, effort, tokenizer, generate):
        seen.append((effort, [one.key for one in questions]))
        return len(questions) - 1, 30

    monkeypatch.setattr("k3_train.evaluate.tasks.count_right", count_right)
    wanted = Wanted(seed=5, limit=3, efforts=("low", "max"))
    results = list(TasksSuite(("sum",)).measure(subject, wanted))
    assert [(one.effort, one.value) for one in results] == [("low", 2 / 3), ("max", 2 / 3)]
    assert results[0].conditions == {"tokens_per_answer": 10}
    assert [effort for effort, _ in seen] == ["low", "max"]
    assert seen[0][1] == seen[1][1]


def test_untrained_tasks_are_answered_wrongly(subject):
    (result,) = TasksSuite(("sum",), max_tokens=4).measure(
        subject, Wanted(limit=2, efforts=("low",))
    )
    assert (result.value, result.count) == (0.0, 2)


@pytest.mark.parametrize("suite", ["tasks", "few_shot", "long_context"])
def test_an_unknown_family_or_option_is_named(suite):
    with pytest.raises(ConfigError, match=rf"{suite}.families.*no family 'sorted'.*There are"):
        open_suite(suite, {"families": ["sorted"]})
    with pytest.raises(ConfigError, match=r"familys.*did you mean 'families'|families"):
        open_suite(suite, {"familys": []})
