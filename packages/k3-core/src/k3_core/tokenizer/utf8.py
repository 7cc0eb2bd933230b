"""Incremental UTF-8 decoder: bytes wait until their character is complete (serving 5C, row 53)."""

import codecs


class Utf8Stream:
    """Turns token bytes into text without ever cutting a character.

    The concatenated output of `feed` and one last `flush` equals
    `b"".join(parts).decode("utf-8", "replace")` for every split of the bytes.
    """

    def __init__(self, pending: bytes = b"") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((pending, 0))

    @property
    def pending(self) -> bytes:
        """The bytes of the unfinished character, at most 3; `Utf8Stream(pending)` continues."""
        return self._decoder.getstate()[0]

    def feed(self, data: bytes) -> str:
        """The text that is complete after `data`; invalid bytes come out as U+FFFD."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD when a character is unfinished, else nothing; the stream is empty after it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
