"""Accuracy on unseen questions of `k3_core.tasks`, tool calls carried out (issue item 10)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from k3_core.errors import K3Error
from k3_core.tasks import Question, draw
from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml.events import ParsedMessage
from k3_core.xtml.parse import parse_message

MAX_TOKENS = 256
MAX_DRAWS = 200

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Continuations of prompts, token ids to token ids."""


def unseen_questions(family: str, count: int, seed: int = 0) -> list[Question]:
    """`count` questions of the test split with different operands."""
    rng = random.Random(f"{seed}:{family}")
    found: dict[str, Question] = {}
    for _ in range(MAX_DRAWS * count):
        question = draw(family, rng, "test")
        found.setdefault(question.key, question)
        if len(found) == count:
            return list(found.values())
    raise K3Error(f"{family} has {len(found)} test questions at hand, {count} were asked for")


def count_right(
    questions: list[Question], effort: str, tokenizer: K3Tokenizer, generate: Generate
) -> tuple[int, int]:
    """(right answers, generated tokens) for questions of one family.

    Where there are tools, exactly one call is made and then a response given. An answer that does
    not end properly is wrong.
    """
    histories = [question.messages for question in questions]
    turns, num_tokens = _ask(questions, histories, effort, tokenizer, generate)
    if questions[0].tools:
        called = [i for i, turn in enumerate(turns) if _has_one_call(turn)]
        rounds = [_tool_round(questions[i], turns[i]) for i in called]
        histories = [histories[i] + messages for i, messages in zip(called, rounds, strict=True)]
        questions = [questions[i] for i in called]
        turns, more = _ask(questions, histories, effort, tokenizer, generate)
        num_tokens += more
    right = sum(
        turn.is_complete and not turn.tool_calls and question.check(turn.content)
        for question, turn in zip(questions, turns, strict=True)
    )
    return right, num_tokens


def _has_one_call(turn: ParsedMessage) -> bool:
    return turn.is_complete and len(turn.tool_calls) == 1 and turn.tool_calls[0].is_complete


def _ask(
    questions: list[Question],
    histories: list[list[dict[str, Any]]],
    effort: str,
    tokenizer: K3Tokenizer,
    generate: Generate,
) -> tuple[list[ParsedMessage], int]:
    prompts = [
        tokenizer.apply_chat_template(history, tools=question.tools, thinking_effort=effort)
        for question, history in zip(questions, histories, strict=True)
    ]
    found = generate(prompts)
    return [parse_message(tokenizer, ids) for ids in found], sum(map(len, found))


def _tool_round(question: Question, turn: ParsedMessage) -> list[dict[str, Any]]:
    (parsed,) = turn.tool_calls
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": parsed.name, "arguments": parsed.arguments},
    }
    return [
        {
            "role": "assistant",
            "reasoning_content": turn.reasoning,
            "content": turn.content,
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": question.tool_result(call)},
    ]
