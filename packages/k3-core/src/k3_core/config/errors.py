"""The one error type of configuration: it names the value, what is allowed and the next step."""

from __future__ import annotations

from collections.abc import Iterable

from k3_core.errors import K3Error, nearest


class ConfigError(K3Error, ValueError):
    """A configuration value that cannot be used.

    Attributes: `path` (dotted name of the value), `problem`, `step` (what to do next).
    """

    def __init__(self, path: str, problem: str, step: str = "") -> None:
        self.path, self.problem, self._step = path, problem, step
        self.step = step or f"Change {path}."
        super().__init__(f"{path}: {problem}. {self.step}")

    def at(self, path: str) -> ConfigError:
        """The same error of the value at another path."""
        return ConfigError(path, self.problem, self._step)

    def within(self, section: str) -> ConfigError:
        """The same error with `section` put before the path."""
        return self.at(f"{section}.{self.path}")


def bad_value(path: str, value: object, allowed: str, step: str = "") -> ConfigError:
    """An error for a value outside the allowed ones."""
    return ConfigError(path, f"{value!r} is not accepted, allowed: {allowed}", step)


def hint(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known key, or lists all of them."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"Did you mean {close!r}?"
    return f"Known keys: {', '.join(names) or 'none'}."
