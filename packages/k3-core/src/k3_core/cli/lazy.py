"""Subcommands by import string: knowing a command does not import it.

Source: design 2 (one command, subcommands added lazily).
"""

import importlib
from dataclasses import dataclass

from k3_core.errors import DuplicateName, K3Error, PluginError
from k3_core.plugins.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: `target` is "module:attribute" of a Typer app or of a function.

    is_plain: the function takes the list of arguments and returns the exit code; typer, which
    takes longer to import than the fast commands take to run, is not involved.
    """

    name: str
    target: str
    help: str
    is_plain: bool = False

    def load(self) -> object:
        """Import the target; a missing third-party module becomes a `K3Error` that names it."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("k3_"):
                raise
            raise K3Error(
                f"`k3 {self.name}` needs the module {error.name!r}, which is not installed; "
                f"install the package that brings the command with its dependencies"
            ) from error


class CommandRegistry:
    """The subcommands that the plugins add by the hook `k3_add_commands`."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    @classmethod
    def collect(cls, plugins: Registry) -> "CommandRegistry":
        """Ask every plugin; one that fails is recorded as broken and adds nothing more."""
        commands = cls()
        # Diagnosis must work when the plugin of k3-core itself is broken.
        for name, text in (
            ("info", "Versions, platform, plugins and settings."),
            ("plugins", "What the plugins offer, what is chosen and why."),
        ):
            commands.add(name, target=f"k3_core.cli.{name}:main", help=text, is_plain=True)
        for _ in plugins.call_each("k3_add_commands", registry=commands):
            pass
        return commands

    def add(self, name: str, *, target: str, help: str, is_plain: bool = False) -> None:
        """Add one subcommand; a name that is taken and a malformed target are errors."""
        if name in self._commands:
            raise DuplicateName(f"command {name!r} is already {self._commands[name].target}")
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise PluginError(
                f"command {name!r}: target {target!r} is not of the form 'module:attribute'"
            )
        self._commands[name] = Command(name=name, target=target, help=help, is_plain=is_plain)

    def get(self, name: str) -> Command | None:
        """The command of this name, or None."""
        return self._commands.get(name)

    def all(self) -> list[Command]:
        """Every command by name."""
        return [self._commands[name] for name in sorted(self._commands)]
