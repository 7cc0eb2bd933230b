"""The cleaning pipeline: a stream of entries in, those worth keeping out, and the counts.

Order: exact duplicates, binary, another encoding, logs, truncated, malformed, rule filters,
quality, near-duplicates. The first rule that a document breaks is counted. Generated entries pass.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from k3_train.data.clean.binary import is_binary, is_utf8
from k3_train.data.clean.log import is_log
from k3_train.data.clean.near import NearDuplicates
from k3_train.data.clean.rules import broken_rule
from k3_train.data.clean.settings import CleanSettings
from k3_train.data.clean.structure import is_malformed
from k3_train.data.clean.truncated import is_truncated
from k3_train.data.documents import Document, Entry

Quality = Callable[[str], float]
"""A classifier: the text of a document to a score between 0 (drop) and 1 (keep)."""


class Cleaner:
    """One cleaning. `report` is filled while `clean` is read.

    Memory grows with the documents: 100 bytes each for exact duplicates, 1.5 kB for near ones.
    """

    def __init__(
        self, settings: CleanSettings | None = None, quality: Quality | None = None
    ) -> None:
        self.settings = settings = settings or CleanSettings()
        self.report: dict[str, Any] = {
            "settings": asdict(settings),
            "read": 0,
            "kept": 0,
            "kept_bytes": 0,
            "dropped": Counter(),
        }
        self._quality = quality
        self._digests: set[bytes] = set()

    def clean(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The entries that break no rule, in order."""
        for entry, reason in self.judge(entries):
            if reason is None:
                yield entry

    def judge(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Every entry with the rule that it breaks, None for those to keep."""
        settings = self.settings
        index = NearDuplicates(settings.near_jaccard, settings.seed) if settings.near else None
        with index or nullcontext() as near:
            for entry in entries:
                reason = self._reason(entry, near) if isinstance(entry, Document) else None
                self._count(entry, reason)
                yield entry, reason

    def _reason(self, document: Document, near: NearDuplicates | None) -> str | None:
        settings, data = self.settings, document.data
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if settings.exact and digest in self._digests:
            return "exact_duplicate"
        self._digests.add(digest)
        if settings.binary and is_binary(data):
            return "binary"
        if not is_utf8(data):
            return "not_utf8"
        if settings.log and is_log(document.text):
            return "log"
        if settings.truncated and is_truncated(document):
            return "truncated"
        if settings.structure and is_malformed(document):
            return "malformed"
        broken = broken_rule(document.text, settings)
        if broken is not None:
            return broken
        if self._quality is not None and self._quality(document.text) < settings.min_quality:
            return "low_quality"
        if near is not None and near.find_or_add(document.text) is not None:
            return "near_duplicate"
        return None

    def _count(self, entry: Entry, reason: str | None) -> None:
        self.report["read"] += 1
        if reason is not None:
            self.report["dropped"][reason] += 1
            return
        self.report["kept"] += 1
        self.report["kept_bytes"] += len(entry.data) if isinstance(entry, Document) else 0
