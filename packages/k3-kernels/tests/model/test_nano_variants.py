"""k3-nano answers alike on every implementation of the model's ops."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from k3_core.evaluate import evaluate_nano
from k3_core.evaluate.greedy import generate_greedy
from k3_core.evaluate.questions import MAX_TOKENS, unseen_questions
from k3_core.model.batch import SequenceBatch
from k3_core.tasks import FAMILIES
from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml.parse import parse_message

NANO, EFFORT = "k3-nano", "low"
CPU_FIGURES = Path(__file__).parents[4] / "docs" / "k3-nano" / "eval-cpu.txt"


@pytest.fixture(scope="module")
def tokenizer():
    return K3Tokenizer.from_pretrained(NANO)


@pytest.fixture(scope="module")
def questions():
    return [question for family in FAMILIES for question in unseen_questions(family, 2)]


@pytest.fixture(scope="module")
def prompts(questions, tokenizer):
    ask = partial(tokenizer.apply_chat_template, thinking_effort=EFFORT)
    return [ask(question.messages, tools=question.tools) for question in questions]


@pytest.fixture(scope="module")
def expected():
    """Filled by the first test that needs it: a session has one model for all its choices."""
    return []


@pytest.fixture
def answers(on_cpu, prompts, tokenizer, expected):
    """Token ids of the answers in float32 on a CPU."""
    if not expected:
        expected += answer(on_cpu(NANO), prompts, tokenizer)
    return expected


def answer(model, prompts, tokenizer):
    return generate_greedy(model, prompts, stop_ids=tokenizer.stop_ids, max_tokens=MAX_TOKENS)


def test_the_answers_are_right(answers, questions, tokenizer):
    for question, ids in zip(questions, answers, strict=True):
        turn = parse_message(tokenizer, ids)
        assert turn.is_complete
        if question.tools:
            assert len(turn.tool_calls) == 1
        else:
            assert question.check(turn.content)


def test_each_variant_alone(load, other_variant, answers, prompts, tokenizer):
    assert answer(load(NANO, other_variant), prompts, tokenizer) == answers


def test_bfloat16_picks_the_same_tokens(load, bfloat16_family, answers, prompts):
    """After each token of the answers; elsewhere in a prompt the model has nothing to know."""
    model = load(NANO, bfloat16_family)
    whole = [prompt + ids for prompt, ids in zip(prompts, answers, strict=True)]
    picked = []
    for ids, own in zip(whole, answers, strict=True):
        batch = SequenceBatch.from_lengths([len(ids)], device=model.device)
        logits_TV = model.forward_packed(torch.tensor(ids, device=model.device), batch).logits
        picked += logits_TV[-len(own) - 1 : -1].argmax(-1).tolist()
    wanted = [token for own in answers for token in own]
    num_same = sum(a == b for a, b in zip(picked, wanted, strict=True))
    assert num_same >= 0.98 * len(wanted)


@pytest.mark.gpu
def test_accuracy(load, fast_family, tokenizer):
    """50 of the questions of docs/k3-nano/eval-cpu.txt, within 2 points of its figures."""
    lines = re.findall(rf"^(\w+) {EFFORT}: (\d+) of (\d+)", CPU_FIGURES.read_text(), re.MULTILINE)
    on_cpu = {family: int(right) / int(count) for family, right, count in lines}
    assert on_cpu.keys() == set(FAMILIES)
    model = load(NANO, fast_family)
    found = evaluate_nano(model, tokenizer, num_questions=50, efforts=(EFFORT,), max_text_bytes=0)
    accuracy = {family: by_effort[EFFORT] for family, by_effort in found["accuracy"].items()}
    assert accuracy == pytest.approx(on_cpu, abs=0.0201)
