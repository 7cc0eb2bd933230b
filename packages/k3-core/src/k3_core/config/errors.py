"""The one error type of configuration: it names the value, what is allowed and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from k3_core.errors import K3Error


class ConfigError(K3Error, ValueError):
    """A configuration value that cannot be used.

    Attributes: `path` (dotted name of the value), `problem`, `step` (what to do next).
    """

    def __init__(self, path: str, problem: str, step: str) -> None:
        super().__init__(f"{path}: {problem}. {step}")
        self.path, self.problem, self.step = path, problem, step

    def within(self, section: str) -> ConfigError:
        """The same error with `section` put before the path."""
        return ConfigError(f"{section}.{self.path}", self.problem, self.step)


def bad_value(path: str, value: object, allowed: str, step: str = "") -> ConfigError:
    """An error for a value outside the allowed ones."""
    return ConfigError(
        path, f"{value!r} is not accepted, allowed: {allowed}", step or f"Change {path}."
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest known key, or lists all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known keys: {', '.join(names) or 'none'}."
