"""The held-out part of the standard library."""

import sysconfig
from pathlib import Path

from k3_core.evaluate import stdlib


def test_parts_are_disjoint_and_complete() -> None:
    base = Path(sysconfig.get_path("stdlib"))
    held_out, training = dict(stdlib.heldout_files()), dict(stdlib.training_files())
    assert not held_out.keys() & training.keys()
    assert list(held_out) == sorted(held_out)
    assert list(training) == sorted(training)
    assert {path.name for path in base.glob("*.py")} <= (held_out | training).keys()
    for name in ("ast.py", "json/decoder.py", "asyncio/base_events.py"):
        assert (held_out | training)[name] == (base / name).read_bytes().decode()
    assert 0.02 < len(held_out) / (len(held_out) + len(training)) < 0.08
    assert not [name for name in held_out | training if "site-packages" in name]


def test_the_split_depends_on_the_path_only() -> None:
    names = [
        "ast.py",
        "abc.py",
        "json/decoder.py",
        "test/test_json/test_dump.py",
        "this.py",
        "uuid.py",
        "venv/__init__.py",
        "argparse.py",
        "bisect.py",
        "textwrap.py",
    ]
    # The bundled model was trained on the others.
    assert [name for name in names if stdlib.is_held_out(name)] == [
        "json/decoder.py",
        "argparse.py",
    ]
