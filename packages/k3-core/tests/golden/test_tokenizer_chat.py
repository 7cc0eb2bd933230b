"""The released tokenizer and chat template: 15 texts and 28 conversations to the letter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3_core.tokenizer import K3Tokenizer
from k3_core.tokenizer.slots import NAMED_SLOTS, PATTERN_PARTS
from k3_core.xtml import chat_segments

NUM_BASE = 163_584


def load(golden: Callable[[str], Path], name: str) -> Any:
    return json.loads((golden("tokenizer_chat") / name).read_text("utf-8"))


@pytest.fixture(scope="module")
def released(mini_tiktoken: Path) -> K3Tokenizer:
    return K3Tokenizer.from_ranks(mini_tiktoken, num_base_tokens=NUM_BASE)


def test_slots_and_pattern_are_the_released_ones(golden):
    expected = load(golden, "special_tokens.json")
    named = {
        str(NUM_BASE + offset): {"content": slot.name, "special": slot.is_special}
        for offset, slot in NAMED_SLOTS.items()
    }
    assert named == expected["added_tokens"]
    assert list(PATTERN_PARTS) == expected["pattern_parts"]


def test_text_and_segments_of_all_chat_cases(golden):
    cases = load(golden, "chat_cases.json")
    assert len(cases) == 28
    for case in cases:
        segments = chat_segments(case["messages"], tools=case["tools"], **case["kwargs"])
        assert [list(segment) for segment in segments] == case["segments"], case["name"]
        assert "".join(text for text, _ in segments) == case["rendered"], case["name"]


def test_ids_of_all_chat_cases(golden, released):
    for case in load(golden, "chat_cases.json"):
        arguments = {"tools": case["tools"], **case["kwargs"]}
        ids = released.apply_chat_template(case["messages"], **arguments)
        assert ids == case["input_ids"], case["name"]
        text = released.apply_chat_template(case["messages"], tokenize=False, **arguments)
        assert text == case["rendered"], case["name"]
        assert released.decode(ids) == text, case["name"]


def test_ids_of_all_text_cases(golden, released):
    cases = load(golden, "text_cases.json")
    assert len(cases) == 15
    for case in cases:
        assert released.encode(case["text"]) == case["ids_plain"]
        assert released.encode(case["text"], allow_special=True) == case["ids_special"]
        assert released.decode(case["ids_plain"]) == case["text"]


def test_saved_folder_gives_the_same_ids(golden, released, mini_tiktoken, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    released.save_pretrained(tmp_path)
    assert (tmp_path / "tiktoken.model").read_bytes() == mini_tiktoken.read_bytes()
    loaded = K3Tokenizer.from_pretrained(tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for case in load(golden, "text_cases.json"):
        assert loaded.encode(case["text"]) == case["ids_plain"]
        assert fast.encode(case["text"]).ids == case["ids_special"]
        decoded = fast.decode(case["ids_plain"], skip_special_tokens=False)
        assert decoded == case["text"]
    for token_id, entry in load(golden, "special_tokens.json")["added_tokens"].items():
        added = fast.get_added_tokens_decoder()[int(token_id)]
        assert (added.content, added.special) == (entry["content"], entry["special"])


def test_released_ids_by_offset(released):
    assert released.vocab_size == 163_840
    assert released.token_bytes(163_592) == b"<|reserved_token_163592|>"
    assert released.stop_ids == {163_585, 163_586}
    assert (released.media_pad_id, released.unk_id, released.pad_id) == (163_605, 163_838, 163_839)
