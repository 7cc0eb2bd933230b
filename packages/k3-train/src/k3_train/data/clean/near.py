"""Near-duplicates: MinHash LSH proposes, the exact Jaccard index of the word sets decides.

Words are runs of letters, digits and underscores, with their case. No two kept documents reach the
threshold, up to what LSH misses: at an index of 0.8, the share of pairs without a common band is
(1 - 0.8^8)^32 = 0.3%.
"""

import re
import tempfile
from array import array
from types import TracebackType
from typing import Any

from k3_train.optional import require

NUM_HASHES = 256
NUM_BANDS = 32
WORD = re.compile(r"\w+")


class NearDuplicates:
    """An index of kept word sets. Memory: about 1.5 kB a document; the sets are on disk.

    Use as a context manager; the temporary file goes with it.
    """

    def __init__(self, jaccard: float = 0.8, seed: int = 0) -> None:
        self._rensa: Any = require("rensa", "data", "finding near-duplicates")
        self._jaccard, self._seed = jaccard, seed
        self._lsh = self._rensa.RMinHashLSH(jaccard, NUM_HASHES, NUM_BANDS)
        self._store = tempfile.TemporaryFile()  # noqa: SIM115 closed by __exit__
        self._ends = array("Q", [0])

    def __enter__(self) -> "NearDuplicates":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.close()

    def find_or_add(self, text: str) -> int | None:
        """The number of an indexed text that is as much alike, or None: the text is then added.

        Texts are numbered from 0 as they are added. A text without words is never alike.
        """
        words = set(WORD.findall(text))
        if not words:
            return None
        minhash = self._rensa.RMinHash(NUM_HASHES, self._seed)
        minhash.update(sorted(words))
        for number in sorted(self._lsh.query(minhash)):
            if self._similarity(number, words) >= self._jaccard:
                return int(number)
        self._lsh.insert(len(self._ends) - 1, minhash)
        self._store.seek(0, 2)
        self._ends.append(self._ends[-1] + self._store.write(_pack(words)))
        return None

    def _similarity(self, number: int, words: set[str]) -> float:
        start, end = self._ends[number : number + 2]
        self._store.seek(start)
        other = set(self._store.read(end - start).decode("utf-8", "surrogatepass").split())
        common = len(words & other)
        return common / (len(words) + len(other) - common)


def _pack(words: set[str]) -> bytes:
    return " ".join(words).encode("utf-8", "surrogatepass")
