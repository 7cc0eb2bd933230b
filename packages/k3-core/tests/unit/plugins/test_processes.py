"""Worker processes load their own table and compare it with that of their parent."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3_core.plugins import PluginTableMismatch, ensure_plugins, list_impls, table_hash

WORKER = """
import sys
from k3_core.plugins import ensure_plugins
print(len(ensure_plugins(sys.argv[1]).impls()))
"""


def _worker(expected: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
    return subprocess.run(
        [sys.executable, "-c", WORKER, expected],
        env={**environment, **settings},
        capture_output=True,
        text=True,
    )


def test_loading_happens_once_in_a_process() -> None:
    assert ensure_plugins() is ensure_plugins()
    assert ensure_plugins(table_hash()) is ensure_plugins()
    assert [impl.name for impl in list_impls("preset")] == sorted(
        impl.name for impl in list_impls("preset")
    )


def test_a_worker_with_the_same_settings_has_the_same_table() -> None:
    done = _worker(table_hash())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list_impls())


def test_a_worker_with_another_table_refuses_to_go_on(
    tmp_path: Path, one_impl: Callable[..., str]
) -> None:
    plugin = tmp_path / "extra_plugin.py"
    plugin.write_text(one_impl("probe.extra"))
    done = _worker(table_hash(), K3_PLUGINS=str(plugin))
    assert done.returncode != 0
    assert "PluginTableMismatch" in done.stderr
    assert "extra_plugin (ok)" in done.stderr


def test_a_wrong_hash_is_an_error_here_too() -> None:
    with pytest.raises(PluginTableMismatch, match="the same K3_PLUGINS"):
        ensure_plugins("0" * 64)


@pytest.mark.multiproc
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_started_processes_check_the_table(method: str) -> None:
    context = multiprocessing.get_context(method)
    for expected, code in ((table_hash(), 0), ("0" * 64, 1)):
        process = context.Process(target=ensure_plugins, args=(expected,))
        process.start()
        process.join(60)
        assert process.exitcode == code
