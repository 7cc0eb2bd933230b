"""The command k3: dispatch, exit codes, one message for an error of ours."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3_core.cli.app import main, run
from k3_core.cli.lazy import CommandRegistry
from k3_core.errors import K3Error
from k3_core.plugins import PluginError, reload_plugins

PLUGIN = """
from k3_core.plugins import hookimpl

@hookimpl
def k3_add_commands(registry):
    registry.add("greet", target="command_plugin:greet", help="Say hello.")
    registry.add("fail", target="command_plugin:fail", help="Fail.")
    registry.add("app", target="command_plugin:app", help="Two commands.")
    registry.add("needy", target="module_that_is_not_there:main", help="Needs a module.")
    registry.add("plain", target="command_plugin:plain", help="Exit code 7.", is_plain=True)
    registry.add("plugins", target="command_plugin:greet", help="Takes a name.")

def greet(name: str, times: int = 1) -> None:
    print("hello " + name * times)

def fail() -> None:
    from k3_core.errors import K3Error
    raise K3Error("width 3 is not a multiple of 32; choose 32 or 64")

def plain(arguments):
    return 7

def __getattr__(name):
    if name != "app":
        raise AttributeError(name)
    import typer
    app = typer.Typer()
    app.command("one")(lambda: print("first"))
    app.command("two")(lambda: print("second"))
    return app
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file plugin that adds commands, and fails when it takes a name that is taken."""
    path = tmp_path / "command_plugin.py"
    path.write_text(PLUGIN)
    search_path = list(sys.path)
    monkeypatch.setenv("K3_PLUGINS", str(path))
    monkeypatch.delenv("K3_PLUGINS_STRICT", raising=False)
    reload_plugins()
    yield
    monkeypatch.undo()
    sys.modules.pop("command_plugin", None)
    sys.path[:] = search_path
    reload_plugins()


def test_help_lists_the_commands_and_version_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert run(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in ("info", "inspect", "plugins", "generate"))
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("k3 0.")


def test_an_unknown_command_is_one_message_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plugns"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "did you mean 'plugins'?" in captured.err


@pytest.mark.usefixtures("plugin")
def test_functions_apps_and_plain_commands_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["greet", "ab", "--times", "2"]) == 0
    assert run(["app", "two"]) == 0
    assert capsys.readouterr().out == "hello abab\nsecond\n"
    assert run(["plain"]) == 7
    assert run(["greet"]) == 2


@pytest.mark.usefixtures("plugin")
def test_an_error_of_ours_is_one_message_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["fail"]) == 2
    assert capsys.readouterr().err == (
        "k3: error: width 3 is not a multiple of 32; choose 32 or 64\n"
    )
    assert run(["needy"]) == 2
    assert "module_that_is_not_there" in capsys.readouterr().err


@pytest.mark.usefixtures("plugin")
def test_a_plugin_that_takes_a_name_is_marked_and_the_command_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plugins", "list"]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("command_plugin"))
    assert "broken" in row
    assert "'plugins' is already" in row


def test_commands_are_kept_by_name_and_loaded_by_import_string() -> None:
    commands = CommandRegistry()
    commands.add("b", target="math:sqrt", help="")
    commands.add("a", target="k3_absent.module:x", help="")
    assert [command.name for command in commands.all()] == ["a", "b"]
    found = commands.get("b")
    assert found is not None
    assert found.load()(9.0) == 3.0  # type: ignore[operator]
    assert commands.get("c") is None
    with pytest.raises(PluginError, match="already math:sqrt"):
        commands.add("b", target="math:cos", help="")
    with pytest.raises(ModuleNotFoundError):
        commands.all()[0].load()
    commands.add("n", target="absent_module.x:y", help="")
    needy = commands.get("n")
    assert needy is not None
    with pytest.raises(K3Error, match="`k3 n` needs the module 'absent_module'"):
        needy.load()


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_told_to(monkeypatch, given, used) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(sys, "argv", ["k3", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["OMP_WAIT_POLICY"] == used
