"""Builds the token files of a run without any download (training 4).

`stdlib`: every training file of the interpreter's standard library, `[BOS] text [EOS]`, loss on
all of it. `chat`: generated conversations in the chat format, loss on the assistant's part only.
"""

import hashlib
import platform
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3_core.evaluate import stdlib
from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml import render_training
from k3_train.data.conversations import Conversation, draw_conversation
from k3_train.data.token_file import TokenFile, TokenFileWriter

CONVERSATIONS_PER_BLOCK = 200


def build_stdlib(
    out: Path, tokenizer: K3Tokenizer, files: Iterable[tuple[str, str]] | None = None
) -> TokenFile:
    """Write files (path, text) of the standard library; None takes all of its training files."""
    hashes: dict[str, str] = {}
    sources = {"kind": "stdlib", "python": platform.python_version(), "sha256": hashes}
    with TokenFileWriter(
        out, vocab_size=tokenizer.vocab_size, has_mask=False, sources=sources
    ) as writer:
        for name, text in stdlib.training_files() if files is None else files:
            ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
            writer.add(ids, [len(ids)])
            hashes[name] = hashlib.sha256(text.encode()).hexdigest()
    return TokenFile.open(out)


def build_chat(
    out: Path, tokenizer: K3Tokenizer, num_tokens: int, *, seed: int = 0, workers: int = 1
) -> TokenFile:
    """Write conversations until there are at least `num_tokens` tokens.

    Blocks of conversations are drawn from (seed, block number): the file does not depend on
    `workers`.
    """
    families: Counter[str] = Counter()
    sources = {"kind": "chat", "seed": seed, "questions": families}
    with TokenFileWriter(
        out, vocab_size=tokenizer.vocab_size, has_mask=True, sources=sources
    ) as writer:
        for block in _blocks(tokenizer, seed, workers):
            writer.add(block.ids, block.lengths, block.mask)
            families.update(block.families)
            if writer.num_tokens >= num_tokens:
                break
    return TokenFile.open(out)


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


@dataclass
class _Block:
    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]
    lengths: list[int]
    families: Counter[str] = field(default_factory=Counter)


class _CachedTokenizer(K3Tokenizer):
    """Conversations consist of few different segments: encode each of them once."""

    def __init__(self, ranks: dict[bytes, int], num_base_tokens: int) -> None:
        super().__init__(ranks, num_base_tokens)
        self._cached = lru_cache(maxsize=1 << 16)(super().encode)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        return self._cached(text, allow_special)


def _render_block(tokenizer: K3Tokenizer, seed: int, number: int) -> _Block:
    rng = random.Random(f"{seed}:{number}")
    ids: list[int] = []
    mask: list[int] = []
    block = _Block(np.empty(0, np.uint32), np.empty(0, np.uint8), [])
    for _ in range(CONVERSATIONS_PER_BLOCK):
        talk = draw_conversation(rng)
        some_ids, some_mask = render(tokenizer, talk)
        ids += some_ids
        mask += some_mask
        block.lengths.append(len(some_ids))
        block.families.update(talk.families)
    block.ids, block.mask = np.array(ids, np.uint32), np.array(mask, np.uint8)
    return block


def _blocks(tokenizer: K3Tokenizer, seed: int, workers: int) -> Iterator[_Block]:
    """Blocks 0, 1, 2, ... in order, rendered ahead by `workers` processes."""
    cached = _CachedTokenizer(tokenizer.ranks, tokenizer.num_base_tokens)
    if workers <= 1:
        yield from (_render_block(cached, seed, number) for number in count())
    # Started afresh rather than forked: the parent may hold threads of the BPE or of torch.
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), _start_worker, (tokenizer.ranks, tokenizer.num_base_tokens)
    )
    pending: deque[Future[_Block]] = deque()
    try:
        for number in count():
            pending.append(pool.submit(_work, seed, number))
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: K3Tokenizer


def _start_worker(ranks: dict[bytes, int], num_base_tokens: int) -> None:
    global _worker_tokenizer
    _worker_tokenizer = _CachedTokenizer(ranks, num_base_tokens)


def _work(seed: int, number: int) -> _Block:
    return _render_block(_worker_tokenizer, seed, number)
