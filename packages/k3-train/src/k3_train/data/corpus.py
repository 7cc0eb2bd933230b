"""Builds token files from sources: clean, encode, write, count (training 4).

`build_corpus` takes any source. `stdlib`: every training file of the interpreter's standard
library, `[BOS] text [EOS]`, loss on all of it. `chat`: generated conversations in the chat
format, loss on the assistant's part only.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from k3_core.errors import K3Error
from k3_core.tokenizer import K3Tokenizer
from k3_train.data.clean.pipeline import Cleaner
from k3_train.data.documents import Described, Document, Entry, Generator, Source
from k3_train.data.encode import EncodedBatch, encode_blocks, encode_entries
from k3_train.data.sources.generated import ChatSource
from k3_train.data.sources.python_files import StdlibSource
from k3_train.data.token_file import TokenFile, TokenFileWriter


def build_corpus(
    out: Path,
    tokenizer: K3Tokenizer,
    source: Source,
    *,
    kind: str,
    num_tokens: int | None = None,
    cleaner: Cleaner | None = None,
    workers: int = 1,
    shard_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda num_tokens, num_documents: None,
) -> TokenFile:
    """Write the token file `out` from `source`, whose registry name is `kind`.

    It ends after the batch that reaches `num_tokens`; a source without end needs that. The file
    depends neither on `workers` nor on the time; the manifest has the source's options and how
    many documents each rule of the cleaner dropped. `progress` is told tokens and documents.
    """
    if isinstance(source, Generator):
        if not num_tokens:
            raise K3Error(f"source {kind!r} has no end: say how many tokens to make with --tokens")
        cleaner = None  # what is generated needs no cleaning
    questions: Counter[str] = Counter()
    sources = describe(source, kind)
    batches = _encoded(tokenizer, source, cleaner, workers)
    first = next(batches, None)
    if first is None:
        raise K3Error(f"source {kind!r} gave no document{_dropped(cleaner)}")
    if first.questions:
        sources["questions"] = questions
    if cleaner is not None:
        sources["cleaning"] = cleaner.report
    with TokenFileWriter(
        out,
        vocab_size=tokenizer.vocab_size,
        has_mask=first.mask is not None,
        has_names=bool(first.names),
        has_images=bool(first.images),
        sources=sources,
        shard_tokens=shard_tokens,
    ) as writer:
        for batch in chain([first], batches):
            writer.add(
                batch.ids, batch.lengths, batch.mask, batch.names or None, images=batch.images
            )
            questions.update(batch.questions)
            progress(writer.num_tokens, writer.num_documents)
            if num_tokens and writer.num_tokens >= num_tokens:
                break
    return TokenFile.open(out)


def build_stdlib(
    out: Path, tokenizer: K3Tokenizer, files: Iterable[tuple[str, str]] | None = None
) -> TokenFile:
    """Write files (path, text) of the standard library; None takes all of its training files."""
    source = StdlibSource() if files is None else _Given(files)
    return build_corpus(out, tokenizer, source, kind="stdlib")


def build_chat(
    out: Path, tokenizer: K3Tokenizer, num_tokens: int, *, seed: int = 0, workers: int = 1
) -> TokenFile:
    """Write conversations until there are at least `num_tokens` tokens.

    Blocks of conversations are drawn from (seed, block number): the file does not depend on
    `workers`.
    """
    source = ChatSource(seed)
    return build_corpus(out, tokenizer, source, kind="chat", num_tokens=num_tokens, workers=workers)


def describe(source: Source, kind: str) -> dict[str, Any]:
    """What a manifest says of a source: its registry name, its options, what it adds itself."""
    options: dict[str, Any] = asdict(source) if is_dataclass(source) else {}
    added = source.describe() if isinstance(source, Described) else {}
    return {"kind": kind, **({"options": options} if options else {}), **added}


class _Given:
    def __init__(self, files: Iterable[tuple[str, str]]) -> None:
        self._files = files

    def entries(self) -> Iterator[Entry]:
        return (Document(name, text.encode()) for name, text in self._files)


def _encoded(
    tokenizer: K3Tokenizer, source: Source, cleaner: Cleaner | None, workers: int
) -> Iterator[EncodedBatch]:
    if isinstance(source, Generator):
        return encode_blocks(tokenizer, source, workers)
    entries = source.entries()
    return encode_entries(tokenizer, cleaner.clean(entries) if cleaner else entries, workers)


def _dropped(cleaner: Cleaner | None) -> str:
    return f": cleaning dropped all, {cleaner.report['dropped']}" if cleaner else ""
