"""The acceptance figures of the bundled model (issue item 10): accuracies and bits per byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from k3_core.evaluate.greedy import generate_greedy
from k3_core.evaluate.questions import MAX_TOKENS, count_right, unseen_questions
from k3_core.evaluate.text import heldout_texts, score_texts
from k3_core.tasks import EFFORTS, FAMILIES

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer


def evaluate_nano(
    model: K3ForConditionalGeneration,
    tokenizer: K3Tokenizer,
    *,
    num_questions: int = 200,
    families: Sequence[str] = FAMILIES,
    efforts: Sequence[str] = EFFORTS,
    seed: int = 0,
    batch_size: int = 200,
    max_text_bytes: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Greedy accuracy by family and effort, and bits per byte on held-out library files.

    Every effort answers the same questions, all of the test split and different. `families` may
    be empty and `max_text_bytes` 0, to leave a part out. `report` is told what is done.
    """
    model.eval()
    started = time.monotonic()
    generate = partial(
        generate_greedy,
        model,
        stop_ids=tokenizer.stop_ids,
        max_tokens=MAX_TOKENS,
        batch_size=batch_size,
    )
    accuracy: dict[str, dict[str, float]] = {}
    tokens: dict[str, dict[str, float]] = {}
    for family in families:
        questions = unseen_questions(family, num_questions, seed)
        accuracy[family], tokens[family] = {}, {}
        for effort in efforts:
            right, num_tokens = count_right(questions, effort, tokenizer, generate)
            accuracy[family][effort] = right / num_questions
            tokens[family][effort] = num_tokens / num_questions
            report(f"{family} {effort}: {right} of {num_questions} right")
    text = None
    if max_text_bytes != 0:
        score = score_texts(model, tokenizer, heldout_texts(max_text_bytes))
        text = asdict(score)
        report(f"held-out text: {score.bits_per_byte:.3f} bits per byte")
    return {
        "num_questions": num_questions,
        "seed": seed,
        "accuracy": accuracy,
        "tokens_per_answer": tokens,
        "text": text,
        "seconds": round(time.monotonic() - started, 1),
    }
