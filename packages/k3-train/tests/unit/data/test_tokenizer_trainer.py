"""Trained ranks: digits stay single, and two BPE implementations agree on the ids."""

import ast
import bisect
import json
import random
import re
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer, models

import k3_core
from k3_core.errors import K3Error
from k3_core.tasks import EFFORTS, FAMILIES, draw
from k3_core.tokenizer import K3Tokenizer
from k3_core.tokenizer.slots import PATTERN
from k3_train.data.tokenizer_trainer import _chat, _untrained, train_ranks

NUM_BASE = 700
TEXT = ["x = 1234567 + 89\n", "for i in range(100):\n    n += i\n", "\u00e9t\u00e9 \u4f60\u597d 12"]


def texts() -> list[str]:
    code = [Path(module.__file__).read_text() for module in (ast, bisect)]
    return [*code, *_chat(200, 0), *TEXT]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return train_ranks(iter(texts()), NUM_BASE)


def test_ranks_are_complete_and_deterministic(ranks: dict[bytes, int]) -> None:
    assert sorted(ranks.values()) == list(range(NUM_BASE))
    assert [ranks[bytes([byte])] for byte in range(256)] == list(range(256))
    assert train_ranks(iter(texts()), NUM_BASE) == ranks


def test_digits_are_never_merged(ranks: dict[bytes, int]) -> None:
    assert not [token for token in ranks if re.search(rb"\d", token) and len(token) > 1]
    ids = K3Tokenizer(ranks, NUM_BASE).encode("sum 123456 of 78")
    tokenizer = K3Tokenizer(ranks, NUM_BASE)
    assert sum(tokenizer.token_bytes(token).isdigit() for token in ids) == 8


def test_tiktoken_gives_the_ids_of_the_trained_merges(ranks: dict[bytes, int]) -> None:
    """The trainer's own library with merges of the ranks, against tiktoken with the ranks."""
    encoding = tiktoken.Encoding("t", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    trained = _with_merges(ranks)
    for text in texts():
        assert trained.encode(text).ids == encoding.encode_ordinary(text)


def _with_merges(ranks: dict[bytes, int]) -> Tokenizer:
    from k3_core.tokenizer.hf_json import byte_letters

    letters = byte_letters()
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(spelled, key=spelled.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in spelled and token[cut:] in spelled
    ]
    tokenizer = Tokenizer(models.BPE(vocab=spelled, merges=merges))
    tokenizer.pre_tokenizer = _untrained().pre_tokenizer
    return tokenizer


def test_too_little_text_is_refused() -> None:
    with pytest.raises(K3Error, match=r"merges for \d+ tokens, 700 were asked for"):
        train_ranks(iter(["abab"]), NUM_BASE)
    with pytest.raises(K3Error, match="below 256"):
        train_ranks(iter(TEXT), 200)


def test_bundled_ranks() -> None:
    """k3-nano's vocabulary: digits single, task text cheap, tokenizer.json equal to the ranks."""
    path = Path(k3_core.__file__).parent / "assets" / "k3-nano" / "tiktoken.model"
    tokenizer = K3Tokenizer.from_ranks(path, 3840)
    assert tokenizer.vocab_size == 4096
    assert len(tokenizer.ranks) == 3840
    assert not [token for token in tokenizer.ranks if re.search(rb"\d", token) and len(token) > 1]
    rng = random.Random(0)
    for family in FAMILIES:
        for effort in EFFORTS:
            question = draw(family, rng)
            ids = tokenizer.apply_chat_template(
                question.training_messages(effort), tools=question.tools, thinking_effort=effort
            )
            assert len(ids) < 400


def test_saved_tokenizer_json_agrees(ranks: dict[bytes, int], tmp_path: Path) -> None:
    ours = K3Tokenizer(ranks, NUM_BASE)
    ours.save_pretrained(tmp_path)
    json.loads((tmp_path / "tokenizer.json").read_text())
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in texts():
        assert theirs.encode(text).ids == ours.encode(text)
