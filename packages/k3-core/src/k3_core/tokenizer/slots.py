"""The 256 special slots after the base tokens, and the released pre-tokenizer (architecture 7)."""

from typing import NamedTuple

NUM_SLOTS = 256


class Slot(NamedTuple):
    """One special token. `is_special` is the flag that skip_special_tokens looks at."""

    name: str
    is_special: bool


NAMED_SLOTS: dict[int, Slot] = {
    0: Slot("[BOS]", True),
    1: Slot("[EOS]", True),
    2: Slot("<|end_of_msg|>", True),
    # The three structural markers are kept by skip_special_tokens: the released flag is false.
    3: Slot("<|open|>", False),
    4: Slot("<|close|>", False),
    5: Slot("<|sep|>", False),
    6: Slot("[start_header_id]", True),
    7: Slot("[end_header_id]", True),
    9: Slot("[EOT]", True),
    18: Slot("<|media_begin|>", True),
    19: Slot("<|media_content|>", True),
    20: Slot("<|media_end|>", True),
    21: Slot("<|media_pad|>", True),
    65: Slot("<osagent_mode>", True),
    254: Slot("[UNK]", True),
    255: Slot("[PAD]", True),
}

# In order of preference; `&&` is class intersection.
PATTERN_PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERN = "|".join(PATTERN_PARTS)


def slot_names(num_base_tokens: int) -> dict[str, int]:
    """Name -> id of all 256 slots; a slot without a released name is `<|reserved_token_ID|>`."""
    names = {}
    for offset in range(NUM_SLOTS):
        token_id = num_base_tokens + offset
        named = NAMED_SLOTS.get(offset)
        names[named.name if named else f"<|reserved_token_{token_id}|>"] = token_id
    return names
