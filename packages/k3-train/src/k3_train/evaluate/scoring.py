"""Log-probabilities and greedy continuations of texts: what suites are made of.

Text is scored as the ids of prompt and answer encoded together, for that is what a model reads in
training; where a token reaches over the border, it counts to the answer.
Legend: T packed tokens, R rows with a logit, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch

from k3_core.evaluate.greedy import generate_greedy
from k3_core.evaluate.losses import grouped
from k3_core.model.batch import SequenceBatch
from k3_train.evaluate.base import Subject

TOKENS_PER_PASS = 16_384
LOGITS_PER_PASS = 1 << 26
"""Values of a tensor of logits, 256 MiB in float32."""


@dataclass(frozen=True)
class Piece:
    """A sequence whose tokens from number `start` on are scored (start >= 1)."""

    ids: Sequence[int]
    start: int


@dataclass(frozen=True)
class Score:
    """logprob: of the scored tokens, in nats. is_greedy: whether each of them was the likeliest."""

    logprob: float
    is_greedy: bool


def joined(
    subject: Subject, prompt: str, answers: Sequence[str], *, is_ended: bool = False
) -> list[Piece]:
    """`[BOS]` prompt answer of each answer, encoded as one text, scored from the same token on.

    is_ended: `[EOS]` follows and is scored too, so that an answer that begins another one does not
    get the other one's share.
    """
    tokenizer = subject.tokenizer
    alone = tokenizer.encode(prompt)
    whole = [tokenizer.encode(prompt + answer) for answer in answers]
    start = 1 + min(shared(alone, ids) for ids in whole)
    end = [tokenizer.eos_id] if is_ended else []
    return [Piece([tokenizer.bos_id, *ids, *end], start) for ids in whole]


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def score(subject: Subject, pieces: Sequence[Piece]) -> list[Score]:
    """The score of each piece; one without a scored token has 0 and is greedy."""
    scores = [Score(0.0, True)] * len(pieces)
    scored = [number for number, one in enumerate(pieces) if one.start < len(one.ids)]

    def sizes(number: int) -> tuple[int, int]:
        length = len(pieces[number].ids)
        return length, length - pieces[number].start

    for group in grouped(scored, sizes, [TOKENS_PER_PASS, _max_rows(subject)]):
        found = _score_group(subject, [pieces[number] for number in group])
        for number, one in zip(group, found, strict=True):
            scores[number] = one
    return scores


def _max_rows(subject: Subject) -> int:
    return max(1, LOGITS_PER_PASS // subject.model.config.text.vocab_size)


@torch.inference_mode()
def _score_group(subject: Subject, group: Sequence[Piece]) -> list[Score]:
    model = subject.model
    # The last token of a sequence predicts nothing that is asked for.
    inputs = [list(one.ids[:-1]) for one in group]
    offsets = accumulate(map(len, inputs), initial=0)
    rows = [
        offset + place
        for offset, one in zip(offsets, group, strict=False)
        for place in range(one.start - 1, len(one.ids) - 1)
    ]
    flat = [token for ids in inputs for token in ids]
    wanted = [token for one in group for token in one.ids[one.start :]]
    ids_T, rows_R, wanted_R = (
        torch.tensor(values, device=model.device) for values in (flat, rows, wanted)
    )
    batch = SequenceBatch.from_lengths([len(ids) for ids in inputs], device=model.device)
    logits_RV = model.forward_packed(ids_T, batch, logit_rows=rows_R).logits
    assert logits_RV is not None
    picked_R = logits_RV.gather(-1, wanted_R[:, None])[:, 0]
    logprobs_R = (picked_R.double() - logits_RV.double().logsumexp(-1)).cpu()
    is_best_R = (logits_RV.argmax(-1) == wanted_R).cpu()
    counts = [len(one.ids) - one.start for one in group]
    parts = zip(logprobs_R.split(counts), is_best_R.split(counts), strict=True)
    return [Score(float(logprobs.sum()), bool(is_best.all())) for logprobs, is_best in parts]


def greedy_lines(subject: Subject, prompts: Sequence[str], max_tokens: int) -> list[str | None]:
    """The first line of the likeliest continuation of each `[BOS]` prompt, without outer spaces.

    None where neither the line nor the text ends within `max_tokens` tokens. Prompts that fit run
    side by side.
    """
    tokenizer = subject.tokenizer
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    newlines = {rank for token, rank in tokenizer.ranks.items() if b"\n" in token}
    longest = max(map(len, ids), default=0) + max_tokens
    found = generate_greedy(
        subject.model,
        ids,
        stop_ids=tokenizer.stop_ids | newlines,
        max_tokens=max_tokens,
        batch_size=max(1, TOKENS_PER_PASS // longest),
    )
    return [_line(subject, one, newlines) for one in found]


def _line(subject: Subject, ids: list[int], newlines: set[int]) -> str | None:
    if ids[-1] not in subject.tokenizer.stop_ids | newlines:
        return None
    kept = ids if ids[-1] in newlines else ids[:-1]
    return subject.tokenizer.decode(kept).partition("\n")[0].strip()


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first occurrence of any of the strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
