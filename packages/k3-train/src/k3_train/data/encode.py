"""Entries to token ids with their loss mask, a batch at a time, by as many processes as wanted."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np
import numpy.typing as npt

from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml import render_training
from k3_train.data.conversations import Conversation
from k3_train.data.documents import Document, Entry, Example, Generator, Interleaved
from k3_train.data.encode_pictures import encode_interleaved
from k3_train.data.image_store import EncodedPicture
from k3_train.data.ordered import ordered_map

BATCH_ENTRIES = 200
BATCH_BYTES = 1 << 22
CACHED_SEGMENT = 256
"""Longest segment, in characters, that is worth remembering."""


@dataclass
class EncodedBatch:
    """Documents end to end: ids, their lengths, and 1 in the mask where there is loss.

    `mask` is None when all of it carries loss. `names` has (name, sha256) of documents,
    `questions` counts the families of generated ones. The spans of `images` are in `ids`.
    """

    ids: npt.NDArray[np.uint32]
    lengths: list[int]
    mask: npt.NDArray[np.uint8] | None
    names: list[tuple[str, str]] = field(default_factory=list)
    questions: Counter[str] = field(default_factory=Counter)
    images: list[EncodedPicture] = field(default_factory=list)


class CachedTokenizer(K3Tokenizer):
    """Conversations consist of few different segments: encode each of them once."""

    def __init__(self, ranks: dict[bytes, int], num_base_tokens: int) -> None:
        super().__init__(ranks, num_base_tokens)
        self._cached = lru_cache(maxsize=1 << 16)(super().encode)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """As `K3Tokenizer.encode`."""
        if len(text) > CACHED_SEGMENT:
            return super().encode(text, allow_special)
        return self._cached(text, allow_special)


def encode_entry(
    tokenizer: K3Tokenizer, entry: Entry
) -> tuple[list[int], list[int] | None, list[EncodedPicture]]:
    """(ids, mask, pictures) of one entry: a document is `[BOS] text [EOS]`, all of it with loss.

    An example has loss on its answer and [EOS], a conversation on what the assistant writes.
    """
    if isinstance(entry, Document):
        return [tokenizer.bos_id, *tokenizer.encode(entry.text), tokenizer.eos_id], None, []
    if isinstance(entry, Example):
        prompt = [tokenizer.bos_id, *tokenizer.encode(entry.prompt)]
        answer = [*tokenizer.encode(entry.answer), tokenizer.eos_id]
        return prompt + answer, [0] * len(prompt) + [1] * len(answer), []
    if isinstance(entry, Interleaved):
        return encode_interleaved(tokenizer, entry)
    return *render(tokenizer, entry), []


def render(tokenizer: K3Tokenizer, talk: Conversation) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and 1 for the ids that the assistant has to produce."""
    ids, mask = render_training(
        tokenizer,
        talk.messages,
        tools=talk.tools,
        thinking=talk.thinking,
        thinking_effort=talk.effort,
    )
    return list(ids), [int(flag) for flag in mask]


def encode_batch(tokenizer: K3Tokenizer, entries: Iterable[Entry]) -> EncodedBatch:
    """One batch of entries of one kind."""
    ids: list[npt.NDArray[np.uint32]] = []
    mask: list[npt.NDArray[np.uint8]] = []
    batch, num_tokens = EncodedBatch(np.empty(0, np.uint32), [], None), 0
    for entry in entries:
        some_ids, some_mask, pictures = encode_entry(tokenizer, entry)
        batch.images += [one.moved(num_tokens) for one in pictures]
        num_tokens += len(some_ids)
        ids.append(np.array(some_ids, np.uint32))
        if some_mask is not None:
            mask.append(np.array(some_mask, np.uint8))
        batch.lengths.append(len(some_ids))
        if isinstance(entry, Document):
            batch.names.append((entry.name, hashlib.sha256(entry.data).hexdigest()))
        else:
            batch.questions.update(entry.families)
    batch.ids = np.concatenate(ids)
    batch.mask = np.concatenate(mask) if mask else None
    return batch


def encode_entries(
    tokenizer: K3Tokenizer, entries: Iterable[Entry], workers: int = 1
) -> Iterator[EncodedBatch]:
    """Batches of all entries, in order."""
    return ordered_map(_encode, batches(entries), workers, _start, _identity(tokenizer))


def encode_blocks(
    tokenizer: K3Tokenizer, generator: Generator, workers: int = 1
) -> Iterator[EncodedBatch]:
    """Blocks 0, 1, 2, ... of a generator, without end; the workers also draw them."""
    tasks = ((generator, number) for number in count())
    return ordered_map(_draw_and_encode, tasks, workers, _start, _identity(tokenizer))


def batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Groups of at most BATCH_ENTRIES entries, closed early when their text is large."""
    group: list[Entry] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += len(entry.data) if isinstance(entry, Document) else 0
        if len(group) == BATCH_ENTRIES or size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


_tokenizer: K3Tokenizer
"""Of this process, when it encodes."""


def _identity(tokenizer: K3Tokenizer) -> tuple[dict[bytes, int], int]:
    return dict(tokenizer.ranks), tokenizer.num_base_tokens


def _start(ranks: dict[bytes, int], num_base_tokens: int) -> None:
    global _tokenizer
    _tokenizer = CachedTokenizer(ranks, num_base_tokens)


def _encode(entries: list[Entry]) -> EncodedBatch:
    return encode_batch(_tokenizer, entries)


def _draw_and_encode(task: tuple[Generator, int]) -> EncodedBatch:
    generator, number = task
    return encode_batch(_tokenizer, generator.block(number))
