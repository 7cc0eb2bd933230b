"""Subcommands by import string: knowing a command does not import it.

Source: design 2 (one command, subcommands added lazily).
"""

import importlib
from dataclasses import dataclass

from k3_core.errors import PluginError


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: `target` is "module:attribute" of a Typer app or of a function."""

    name: str
    target: str
    help: str

    def load(self) -> object:
        """Import the target; errors of the import are the caller's to see."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class CommandRegistry:
    """The subcommands that the plugins add by the hook `k3_add_commands`."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    def add(self, name: str, *, target: str, help: str) -> None:
        """Add one subcommand; a name that is taken is an error."""
        if name in self._commands:
            raise PluginError(f"command {name!r} is already {self._commands[name].target}")
        self._commands[name] = Command(name=name, target=target, help=help)

    def get(self, name: str) -> Command | None:
        """The command of this name, or None."""
        return self._commands.get(name)

    def all(self) -> list[Command]:
        """Every command by name."""
        return [self._commands[name] for name in sorted(self._commands)]
