"""Question families against answers computed another way, and the split of their operands."""

import ast
import random
import re
import subprocess
import sys

import pytest

from k3_core.errors import K3Error
from k3_core.tasks import EFFORTS, FAMILIES, SPLITS, Question, check, draw, is_test

NUM = 300


def questions(family: str, split: str = "train") -> list[Question]:
    rng = random.Random(f"{family} {split}")
    return [draw(family, rng, split) for _ in range(NUM)]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def answer_from_prompt(question: Question) -> str:
    """Solve a question from what the user sees only."""
    prompt = question.prompt
    if question.family == "sum":
        return str(sum(numbers(prompt)))
    if question.family == "sort":
        return ", ".join(str(n) for n in sorted(numbers(prompt)))
    if question.family == "lookup":
        pairs = dict(
            re.findall(
                r"(\w+): (\w+)",
                prompt.replace("list:", "").replace("pairs:", "").replace("Pairs:", ""),
            )
        )
        (asked,) = re.findall(r"(?:value of|Find|what is) (?!the)(\w+)", prompt)
        return pairs[asked]
    call = called(question)
    (asked,) = re.findall(r'"(\w+)"', prompt)
    assert list(call["function"]["arguments"].values()) == [asked]
    return question.tool_result(call)


def called(question: Question) -> dict:
    (call,) = question.reference_turn("low")[0]["tool_calls"]
    return call


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_from_the_prompt(family: str, split: str) -> None:
    for question in questions(family, split):
        assert question.answer == answer_from_prompt(question)
        assert question.messages == [{"role": "user", "content": question.prompt}]


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_are_disjoint_and_about_a_tenth_is_test(family: str) -> None:
    assert all(q.split == "train" for q in questions(family))
    assert all(q.split == "test" for q in questions(family, "test"))
    assert not {q.key for q in questions(family)} & {q.key for q in questions(family, "test")}
    part = sum(is_test(f"{family}:{n}") for n in range(20_000)) / 20_000
    assert 0.09 < part < 0.11


def test_the_split_never_changes() -> None:
    test_keys = [n for n in range(60) if is_test(f"sum:{n},{n}")]
    assert test_keys == [13, 19, 25, 26, 48, 57]  # the bundled model was trained on the rest


def test_key_ignores_order_and_wording() -> None:
    sums = {}
    for question in questions("sum") + questions("sum", "test"):
        sums.setdefault(question.key, tuple(sorted(numbers(question.prompt))))
        assert sums[question.key] == tuple(sorted(numbers(question.prompt)))
    for question in questions("sort"):
        assert numbers(question.key) == sorted(numbers(question.prompt))
    for question in questions("lookup"):
        asked, pairs = question.key.split("|")
        assert pairs.split(",") == sorted(pairs.split(","))
        assert f"{asked}:{question.answer}" in pairs.split(",")


def test_operands_cover_the_stated_ranges() -> None:
    operands = [numbers(q.prompt) for q in questions("sum")]
    assert {len(pair) for pair in operands} == {2}
    assert {len(str(n)) for pair in operands for n in pair} == {1, 2, 3}
    lists = [numbers(q.prompt) for q in questions("sort")]
    assert {len(items) for items in lists} == {3, 4, 5, 6}
    assert max(max(items) for items in lists) == 99
    pairs = [len(re.findall(r"\w+: \w+", q.prompt)) for q in questions("lookup")]
    assert min(pairs) == 4
    assert max(pairs) in (10, 11)  # "list: key" looks like a pair


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_turn_ends_in_the_plain_answer(family: str, effort: str) -> None:
    for question in questions(family)[:50]:
        turn = question.reference_turn(effort)
        assert question.training_messages(effort) == question.messages + turn
        assert [m["role"] for m in turn] == (
            ["assistant", "tool", "assistant"] if family == "tool_lookup" else ["assistant"]
        )
        assert turn[-1]["content"] == question.answer
        assert check(question, turn[-1]["content"])


@pytest.mark.parametrize("family", FAMILIES)
def test_more_effort_thinks_longer(family: str) -> None:
    mean = [
        sum(
            len(m.get("reasoning_content", ""))
            for q in questions(family)
            for m in q.reference_turn(effort)
        )
        for effort in EFFORTS
    ]
    assert mean[0] < mean[1] < mean[2]


def test_sum_reasoning_is_true() -> None:
    for question in questions("sum"):
        totals = numbers(question.reasoning("low"))
        digits = [str(total % 10) for total in totals[:-1]]
        assert str(totals[-1]) + "".join(reversed(digits)) == question.answer
        for effort in ("high", "max"):
            equations = re.findall(r"([\d+-]+)=(\d+)", question.reasoning(effort))
            assert len(equations) >= len(totals)
            for left, right in equations:
                terms = re.findall(r"[+-]?\d+", left)
                assert sum(int(term) for term in terms) == int(right)
        for written, carry in re.findall(r"write (\d), carry (\d)", question.reasoning("max")):
            assert int(carry + written) in totals


def test_sort_reasoning_is_true() -> None:
    for question in questions("sort"):
        ordered = numbers(question.answer)
        assert [int(c) for c in question.reasoning("low")] == [n // 10 for n in ordered]
        groups = [numbers(group) for group in question.reasoning("high").split(";")]
        assert [n for _, *group in groups for n in group] == ordered
        steps = [numbers(line) for line in question.reasoning("max").splitlines()[:-1]]
        taken = [step[-1] for step in steps]
        assert taken == ordered
        assert all(step[-1] == min(step[:-1]) for step in steps[:-1])


@pytest.mark.parametrize(
    "text, is_right",
    [
        ("7, 12", True),
        (" 7, 12\n", True),
        ("7, 12.", True),
        ("7, 12..", False),
        ("7,12", False),
        ("7, 12, 13", False),
        ("", False),
        ("the answer is 7, 12", False),
    ],
)
def test_check_is_exact(text: str, is_right: bool) -> None:
    question = draw("sort", random.Random(0))
    fixed = type(question)(key="", prompt="", answer="7, 12", numbers=(12, 7))
    assert check(fixed, text) is is_right


def test_tool_answers_only_the_right_call() -> None:
    for question in questions("tool_lookup")[:20]:
        call = called(question)
        function = call["function"]
        ((argument, asked),) = function["arguments"].items()
        declared = question.tools[0]["function"]
        assert declared["name"] == function["name"]
        assert declared["parameters"]["required"] == [argument]
        as_json = {"function": function | {"arguments": f'{{"{argument}": "{asked}"}}'}}
        assert question.tool_result(as_json) == question.answer
        for arguments in ({argument: asked + "x"}, {"other": asked}, {}, None, "not json", "[1]"):
            wrong = {"function": function | {"arguments": arguments}}
            assert question.tool_result(wrong) == "not found"
        wrong = {"function": function | {"name": "other"}}
        assert question.tool_result(wrong) == "not found"


def test_drawing_is_reproducible_and_refuses_unknown_names() -> None:
    one, two = (draw("lookup", random.Random(7), "test") for _ in range(2))
    assert one == two
    with pytest.raises(K3Error, match=r"family 'product'.*tool_lookup"):
        draw("product", random.Random(0))
    with pytest.raises(K3Error, match=r"split 'dev'.*train, test"):
        draw("sum", random.Random(0), "dev")
    with pytest.raises(K3Error, match=r"effort 'medium'.*low, high, max"):
        draw("sum", random.Random(0)).reference_turn("medium")
    with pytest.raises(K3Error, match="has no tools"):
        draw("sum", random.Random(0)).tool_result({"function": {"name": "f"}})


def test_no_torch() -> None:
    code = "import sys, k3_core.tasks, k3_core.evaluate.stdlib; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) is False
