"""What a person sees of a build: a line that is renewed on a terminal, a line now and then else."""

import sys
import time
from typing import TextIO

SECONDS = {True: 0.2, False: 10.0}
"""Between two lines, on a terminal and elsewhere."""


class BuildProgress:
    """Called with the tokens and documents written so far."""

    def __init__(self, name: str, num_tokens: int | None, stream: TextIO | None = None) -> None:
        self._name, self._goal = name, num_tokens
        self._stream = stream or sys.stderr
        self._is_live = self._stream.isatty()
        self._started = self._shown = time.monotonic()

    def __call__(self, num_tokens: int, num_documents: int) -> None:
        """Show where the build is, when it is time to."""
        now = time.monotonic()
        if now - self._shown < SECONDS[self._is_live]:
            return
        self._shown = now
        pace = num_tokens / (now - self._started)
        goal = f" of {self._goal:,}" if self._goal else ""
        text = (
            f"{self._name}: {num_tokens:,}{goal} tokens, {num_documents:,} documents, {pace:,.0f}/s"
        )
        print(
            f"\r{text}" if self._is_live else text,
            end="" if self._is_live else "\n",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        """End the line."""
        if self._is_live:
            print(file=self._stream)
