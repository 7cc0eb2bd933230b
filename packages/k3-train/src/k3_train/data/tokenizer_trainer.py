"""Training a byte pair encoding whose ranks K3Tokenizer reads (architecture 7, training 4).

The pre-tokenizer is the released one, except that every digit stands alone, so no token holds two
digits: columns of numbers stay aligned for a small model. At encoding the released pattern is used
unchanged; it may keep three digits together, which have no merges.
"""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from k3_core.errors import K3Error
from k3_core.evaluate import stdlib
from k3_core.tokenizer.hf_json import byte_letters
from k3_core.tokenizer.ranks import write_ranks
from k3_core.tokenizer.slots import PATTERN_PARTS
from k3_core.xtml.render import chat_segments
from k3_train.data.conversations import draw_conversation

if TYPE_CHECKING:
    import tokenizers

NUMBERS = r"\p{N}{1,3}"
SINGLE_DIGITS = tuple(r"\p{N}" if part == NUMBERS else part for part in PATTERN_PARTS)


def train_ranks(texts: Iterator[str], num_base_tokens: int) -> dict[bytes, int]:
    """Token bytes -> rank: the 256 bytes, then `num_base_tokens - 256` merges, best first."""
    if num_base_tokens < 256:
        raise K3Error(f"num_base_tokens {num_base_tokens} is below 256: every byte is a token")
    from tokenizers import trainers

    tokenizer = _untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=num_base_tokens, initial_alphabet=byte_letters(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocab = tokenizer.get_vocab()
    learned = [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)]
    merged = [token for token in learned if len(token) > 1]
    if 256 + len(merged) != num_base_tokens:
        raise K3Error(
            f"the text has merges for {256 + len(merged)} tokens, {num_base_tokens} were "
            "asked for: train on more text or ask for fewer"
        )
    return {token: rank for rank, token in enumerate([*map(_byte, range(256)), *merged])}


def nano_texts(num_conversations: int, seed: int) -> Iterator[str]:
    """The bundled model's text: training files of the standard library, and conversations.

    Conversations come as the segments that are encoded one by one, control tokens left out.
    """
    return chain((text for _, text in stdlib.training_files()), _chat(num_conversations, seed))


def train_nano_tokenizer(
    out: Path, num_base_tokens: int, num_conversations: int, seed: int
) -> dict[bytes, int]:
    """Train on `nano_texts` and write the rank file `out`."""
    ranks = train_ranks(nano_texts(num_conversations, seed), num_base_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_ranks(out, ranks)
    return ranks


def _chat(num_conversations: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(num_conversations):
        talk = draw_conversation(rng)
        segments = chat_segments(
            talk.messages,
            tools=talk.tools,
            thinking=talk.thinking,
            thinking_effort=talk.effort,
            add_generation_prompt=False,
        )
        yield from (text for text, is_control in segments if not is_control)


def _untrained() -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(SINGLE_DIGITS)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _byte(value: int) -> bytes:
    return bytes([value])
