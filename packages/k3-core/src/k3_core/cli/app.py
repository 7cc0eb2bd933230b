"""The command `k3`: finds the subcommand among those of the plugins and imports only that one.

Nothing here imports torch, and typer only once a subcommand runs. Source: design 2.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3_core.__about__ import __version__
from k3_core.errors import K3Error, nearest

if TYPE_CHECKING:
    from k3_core.cli.lazy import Command, CommandRegistry
    from k3_core.plugins import Registry

USAGE = "Usage: k3 [--help | --version] COMMAND [ARGS]..."
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main() -> None:
    """Entry point of the console script."""
    # Read when torch starts its threads. By default they spin while they wait: on cores that are
    # busy with something else, two of them took 4 times as long as one for `k3 eval nano`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; an error of ours is one message, code 2."""
    try:
        return _dispatch(list(arguments))
    except K3Error as error:
        print(f"k3: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`k3 ... | head`); the interpreter must not flush into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except SystemExit as stop:
        return _exit_code(stop)


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] == "--version":
        print(f"k3 {__version__}")
        return 0
    # Imported here: `k3 --version` does without.
    from k3_core.cli.lazy import CommandRegistry
    from k3_core.plugins import ensure_plugins

    plugins = ensure_plugins()
    commands = CommandRegistry.collect(plugins)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(commands, plugins))
        return 0
    command = commands.get(arguments[0])
    if command is None:
        raise K3Error(_unknown(arguments[0], commands))
    target: Any = command.load()
    if command.is_plain:
        return int(target(arguments[1:]))
    _invoke(command, target, arguments[1:])
    return 0


def _invoke(command: "Command", target: Any, arguments: list[str]) -> None:
    """Run a Typer app, or a function as one; ends by `SystemExit` or by an exception."""
    # Imported here: the plain commands, `k3 --help` and `k3 --version` do without.
    import typer

    app = target if isinstance(target, typer.Typer) else _app_of(target)
    app(args=arguments, prog_name=f"k3 {command.name}")


def _app_of(function: Callable[..., Any]) -> Any:
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(function)
    return app


def _help(commands: "CommandRegistry", plugins: "Registry") -> str:
    listed = commands.all()
    width = max((len(command.name) for command in listed), default=0)
    rows = [f"  {command.name:<{width}}  {command.help}" for command in listed]
    failed = [r.name for r in plugins.records if r.state == "broken"]
    notes = [f"\nBroken plugins: {', '.join(failed)}; see `k3 plugins list`."] if failed else []
    return "\n".join([USAGE, "\nCommands:", *rows, *notes])


def _unknown(name: str, commands: "CommandRegistry") -> str:
    names = [command.name for command in commands.all()]
    near = nearest(name, names)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(names)}."
    return f"no command {name!r}; {hint} A command of another package needs it installed."


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return EXIT_FAILED


if __name__ == "__main__":
    main()
