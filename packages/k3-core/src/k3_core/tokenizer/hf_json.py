"""The same vocabulary as a `tokenizer.json` of the Hugging Face `tokenizers` library.

Byte-level BPE whose merges are read off the ranks. tiktoken joins the neighbours whose union has
the lowest rank, however the union is split; so every split of a token into two tokens is a merge,
in the order of the token's rank. A token that has no such split (its parts are absent from a rank
file with gaps) is still found when it is a whole pre-token: `ignore_merges` says so, as tiktoken
does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from k3_core.tokenizer.slots import NAMED_SLOTS, PATTERN, slot_names


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_json(ranks: Mapping[bytes, int], num_base_tokens: int) -> dict[str, Any]:
    """The content of tokenizer.json; its ids equal those of K3Tokenizer with specials allowed."""
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.__getitem__)
    slots = slot_names(num_base_tokens)
    # The slots are in the vocabulary too: an added token absent from it is numbered by the
    # vocabulary's length, which is wrong as soon as the ranks have gaps.
    vocab = {spell(token): ranks[token] for token in ordered} | slots
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, **added_token(name, token_id - num_base_tokens)}
            for name, token_id in slots.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": [[spell(a), spell(b)] for a, b in _merges(ordered, ranks)],
        },
    }


def added_token(name: str, offset: int) -> dict[str, Any]:
    """The description of a slot; unnamed slots are not flagged special, as in the release."""
    named = NAMED_SLOTS.get(offset)
    return {
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": named is not None and named.is_special,
    }


def _merges(ordered: list[bytes], ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in ordered:
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
