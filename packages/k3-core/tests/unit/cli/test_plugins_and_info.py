"""`k3 plugins` and `k3 info`: their JSON documents and exit codes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3_core.cli.app import run
from k3_core.plugins import list_impls, reload_plugins, table_hash

Ask = Callable[..., Any]

BROKEN = "import module_that_is_not_there\n"
PROBE = """
from k3_core.plugins import Impl, hookimpl

@hookimpl
def k3_register_kernel():
    common = {"kind": "kernel", "implements": "probe"}
    return [
        Impl(name="probe.fine", target="math:sqrt", **common),
        Impl(name="probe.bad", target="math:no_such_thing", devices={"cuda"}, **common),
        Impl(name="probe.needy", target="absent:x", requires=("absent-thing>=1",), **common),
    ]

@hookimpl
def k3_info():
    return {"licence": "MIT"}
"""


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command with --json, check its exit code, return the document."""

    def asked(*arguments: str, code: int = 0) -> Any:
        assert run([*arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return asked


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One plugin that works, with a target that does not import, and one that is broken."""
    (tmp_path / "probe_plugin.py").write_text(PROBE)
    (tmp_path / "wrong_plugin.py").write_text(BROKEN)
    search_path = list(sys.path)
    names = ("probe_plugin.py", "wrong_plugin.py")
    monkeypatch.setenv("K3_PLUGINS", ",".join(str(tmp_path / name) for name in names))
    monkeypatch.delenv("K3_PLUGINS_STRICT", raising=False)
    reload_plugins()
    yield
    monkeypatch.undo()
    sys.modules.pop("probe_plugin", None)
    sys.path[:] = search_path
    reload_plugins()


@pytest.mark.usefixtures("probes")
def test_list_shows_the_error_of_a_broken_plugin_beside_the_others(ask: Ask) -> None:
    records = {record["name"]: record for record in ask("plugins", "list")}
    assert records["k3_core"]["state"] == "ok"
    assert records["k3_core"]["num_impls"] > 20
    assert records["probe_plugin"]["num_impls"] == 3
    assert records["wrong_plugin"]["state"] == "broken"
    assert "module_that_is_not_there" in records["wrong_plugin"]["error"]
    assert records["wrong_plugin"]["load_seconds"] > 0


@pytest.mark.usefixtures("probes")
def test_impls_tells_what_can_run(ask: Ask) -> None:
    rows = {row["name"]: row for row in ask("plugins", "impls", "--kind", "kernel")}
    assert rows["probe.fine"]["available"] is True
    assert rows["probe.fine"]["plugin"] == "probe_plugin"
    assert rows["probe.bad"]["reason"] == "runs on cuda, not on cpu"
    assert "absent-thing" in rows["probe.needy"]["reason"]
    assert {row["kind"] for row in rows.values()} == {"kernel"}
    only = ask("plugins", "impls", "--op", "probe", "--device", "cuda", "--dtype", "float32")
    assert [row["name"] for row in only if row["available"]] == ["probe.bad", "probe.fine"]


@pytest.mark.usefixtures("probes")
def test_why_gives_the_choice_and_every_reason(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask("plugins", "why", "kernel", "probe")
    assert (answer["chosen"], answer["source"]) == ("probe.fine", "auto")
    assert {row["name"] for row in answer["rejected"]} == {"probe.bad", "probe.needy"}
    refused = ask("plugins", "why", "kernel", "probe", "--name", "needy", code=2)
    assert refused["chosen"] is None
    assert "pip install" not in refused["error"].splitlines()[0]
    assert run(["plugins", "why", "kernel", "probe", "--dtype", "int3"]) == 2
    assert "takes float32, not int3" in capsys.readouterr().err


def test_why_attention_kda_on_a_gpu_is_explained_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["attention", "kda", "--device", "cuda", "--dtype", "bfloat16"]
    assert run(["plugins", "why", *arguments, "--capability", "9.0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("attention kda for cuda, bfloat16\nchosen: kda.")
    assert run(["plugins", "why", *arguments, "--capability", "nine"]) == 2


@pytest.mark.usefixtures("probes")
def test_doctor_imports_everything_and_fails_for_what_does_not(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ask("plugins", "doctor", code=1)
    problems = {problem["what"]: problem for problem in report["problems"]}
    assert "no_such_thing" in problems["kernel probe.bad"]["traceback"]
    assert "module_that_is_not_there" in problems["plugin wrong_plugin"]["traceback"]
    assert "kernel probe.needy" in report["skipped"]
    assert report["num_imported"] > 20
    assert run(["plugins", "doctor"]) == 1
    assert "Traceback" in capsys.readouterr().out


def test_doctor_finds_nothing_wrong_with_ours() -> None:
    assert run(["plugins", "doctor"]) == 0


@pytest.mark.usefixtures("probes")
def test_info(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_SERVE_API_KEY", "abc")
    monkeypatch.setenv("K3_SOMETHING", "def")
    report = ask("info")
    assert report["libraries"]["torch"][0].isdecimal()
    assert report["plugins"]["wrong_plugin"].startswith("file broken: ModuleNotFoundError")
    assert report["environment"]["K3_SOMETHING"] == "def"
    assert report["environment"]["K3_SERVE_API_KEY"] == "(hidden)"
    assert report["more"] == {"probe_plugin licence": "MIT"}
    choices = report["choices on cpu in float32"]
    assert choices["kernel kda_segment"] == "kda_segment.cpu by auto"
    assert choices["kernel probe"] == "probe.fine by auto"
    assert "attention kda" not in choices  # nothing to choose between
    shown = f"{len(list_impls())}, table {table_hash()[:12]}"
    assert report["implementations"] == shown


@pytest.mark.usefixtures("probes")
def test_info_and_doctor_go_on_past_a_plugin_that_misbehaves_late(ask: Ask, tmp_path: Path) -> None:
    """A wrong result of `k3_info`, a malformed command and a target that ends the process."""
    source = PROBE.replace('return {"licence": "MIT"}', 'return "MIT"')
    source = source.replace("math:no_such_thing", "probe_target:x")
    source += (
        '\n@hookimpl\ndef k3_add_commands(registry):\n    registry.add("x", target="y", help="")'
    )
    (tmp_path / "probe_plugin.py").write_text(source)
    (tmp_path / "probe_target.py").write_text("import sys\nsys.exit(3)\n")
    sys.modules.pop("probe_plugin", None)
    reload_plugins()
    report = ask("info")
    assert "k3_info: PluginError: returned 'MIT'" in report["plugins"]["probe_plugin"]
    assert report["more"] == {}
    problems = {p["what"]: p["error"] for p in ask("plugins", "doctor", code=1)["problems"]}
    assert "SystemExit: 3" in problems["kernel probe.bad"]
    assert "'module:attribute'" in problems["plugin probe_plugin"]


@pytest.mark.parametrize("command", ["list", "impls"])
def test_tables_have_aligned_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", command]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    column = header.index(header.split()[1])
    assert rows
    assert all(row[column - 1] == " " and row[column] != " " for row in rows)
