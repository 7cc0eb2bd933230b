"""Multi-query associative recall: can a model look up what it read (training 4, Kimi Linear 5.1).

A document is `[BOS] k1 v1 ... kn vn`, then the same keys in another order, each with its value.
Keys and values are single tokens of two disjoint sets. Only the values of the second part carry
loss, and each is known from the document: the best accuracy is 1, a guess among the values has
1/64.
"""

import random
from pathlib import Path

from k3_core.errors import K3Error
from k3_train.data.token_file import TokenFile, TokenFileWriter

NUM_KEYS = NUM_VALUES = 64
FIRST_KEY = 128
"""Bytes from here on occur in no ASCII text."""
FIRST_VALUE = FIRST_KEY + NUM_KEYS


def draw(rng: random.Random, num_pairs: int, bos: int) -> tuple[list[int], list[int]]:
    """Ids of one document, and 1 for those that can be known from what stands before them."""
    keys = rng.sample(range(FIRST_KEY, FIRST_KEY + NUM_KEYS), num_pairs)
    values = {key: FIRST_VALUE + rng.randrange(NUM_VALUES) for key in keys}
    asked = rng.sample(keys, num_pairs)
    ids = [bos, *(token for key in (*keys, *asked) for token in (key, values[key]))]
    return ids, [0] * (1 + 2 * num_pairs) + [0, 1] * num_pairs


def build_recall(
    out: Path, *, num_pairs: int, num_tokens: int, vocab_size: int, bos: int, seed: int
) -> TokenFile:
    """Write documents until there are at least `num_tokens` tokens."""
    if not 1 <= num_pairs <= NUM_KEYS:
        raise K3Error(f"recall_pairs {num_pairs} is not in 1..{NUM_KEYS}: there are so many keys")
    rng = random.Random(f"recall:{seed}")
    sources = {"kind": "recall", "pairs": num_pairs, "seed": seed}
    with TokenFileWriter(out, vocab_size=vocab_size, has_mask=True, sources=sources) as writer:
        while writer.num_tokens < num_tokens:
            ids, mask = draw(rng, num_pairs, bos)
            writer.add(ids, [len(ids)], mask)
    return TokenFile.open(out)
