"""Scores of answers against one forward a token, and lines of greedy continuations."""

import random

import pytest
import torch

from k3_core.tokenizer import K3Tokenizer
from k3_train.data.documents import Example
from k3_train.data.encode import encode_entry
from k3_train.data.long_context import FAMILIES, draw_item
from k3_train.evaluate import scoring
from k3_train.evaluate.base import Subject
from k3_train.evaluate.scoring import Piece, greedy_lines, joined, score


def by_brute_force(subject, piece):
    total, is_greedy = 0.0, True
    for place in range(piece.start, len(piece.ids)):
        logits = subject.model(input_ids=torch.tensor([list(piece.ids[:place])])).logits[0, -1]
        total += float(logits.detach().double().log_softmax(-1)[piece.ids[place]])
        is_greedy &= int(logits.argmax()) == piece.ids[place]
    return total, is_greedy


@pytest.mark.parametrize("tokens, rows", [(16_384, 1 << 26), (40, 1 << 26), (16_384, 12 * 512)])
def test_scores_are_those_of_one_forward_a_token(subject, monkeypatch, tokens, rows):
    monkeypatch.setattr(scoring, "TOKENS_PER_PASS", tokens)
    monkeypatch.setattr(scoring, "LOGITS_PER_PASS", rows)
    pieces = joined(subject, "Question?\n", ["yes", "no", "a longer answer than that"])
    pieces += joined(subject, "", ["no prompt"], is_ended=True)
    best = int(
        subject.model(input_ids=torch.tensor([[subject.tokenizer.bos_id]])).logits[0].argmax()
    )
    pieces += [Piece([subject.tokenizer.bos_id, best], 1), Piece([subject.tokenizer.bos_id], 1)]
    found = score(subject, pieces)
    for piece, one in zip(pieces, found, strict=True):
        total, is_greedy = by_brute_force(subject, piece)
        assert one.logprob == pytest.approx(total, rel=1e-5, abs=1e-9)
        assert one.is_greedy == is_greedy
    assert [one.is_greedy for one in found] == [False] * 4 + [True] * 2


def test_a_token_over_the_border_counts_to_every_answer(subject):
    """`ab` is one token, so the prompt `xa` ends before it, also for answers without it."""
    ranks = {bytes([byte]): byte for byte in range(255)} | {b"ab": 255}
    tokenizer = K3Tokenizer(ranks, 256)
    merged = Subject(subject.model, tokenizer, "merged", "none")
    first, second = joined(merged, "xa", ["b", "c"], is_ended=True)
    bos, eos, x = tokenizer.bos_id, tokenizer.eos_id, ord("x")
    assert (first.ids, first.start) == ([bos, x, 255, eos], 2)
    assert (second.ids, second.start) == ([bos, x, ord("a"), ord("c"), eos], 2)


def test_the_first_line_is_the_answer_and_has_to_end(subject, answering):
    answers = {"a": " 12 ", "b": "34\n56", "c": "x" * 99, "d": "\n", "e": "12345"}
    asked = answering(answers.__getitem__)
    assert greedy_lines(subject, list(answers), 6) == ["12", "34", None, "", "12345"]
    assert asked == list(answers)


def test_real_continuations_end_with_their_first_line(subject):
    """Against a loop that takes the likeliest token, the third of which is made a newline."""
    bos, prompt = subject.tokenizer.bos_id, "0 1 2 3"
    ids = [bos, *prompt.encode()]
    first = len(ids)
    for _ in range(3):
        ids.append(int(subject.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    ranks = dict(subject.tokenizer.ranks)
    last = subject.tokenizer.token_bytes(ids[-1])
    assert last not in prompt.encode() and ids[-1] not in ids[first:-1]
    ranks[b"\n"], ranks[last] = ids[-1], ranks[b"\n"]
    renamed = Subject(subject.model, K3Tokenizer(ranks, 256), "renamed", "none")
    expected = renamed.tokenizer.decode(ids[first:-1]).strip()
    assert greedy_lines(renamed, [prompt, "other"], 9)[0] == expected
    assert greedy_lines(renamed, [prompt], 2) == [None]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_scored_are_the_ids_and_the_answer_of_training(family):
    tokenizer = K3Tokenizer.from_pretrained("k3-nano")
    item = draw_item(family, 5000, random.Random(1))
    ids, mask, _ = encode_entry(tokenizer, Example(item.prompt, item.answer))
    (piece,) = joined(Subject(None, tokenizer, "", ""), item.prompt, [item.answer], is_ended=True)
    assert piece.ids == ids
    assert [int(place >= piece.start) for place in range(len(ids))] == mask
