"""TOML files and `--set` into frozen dataclasses: strict keys and types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from k3_core.config import ConfigError, apply_overrides, load_config, load_dataclass


@dataclass(frozen=True)
class Optim:
    name: Literal["muon", "adamw"] = "muon"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Run:
    steps: int
    optim: Optim = field(default_factory=Optim)
    note: str | None = None
    stages: tuple[Optim, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


FILE = """
steps = 10
note = "first"
[optim]
lr = 1
betas = [0.8, 0.9]
[[stages]]
name = "adamw"
[impl]
"attention.kda" = "kda.reference"
"""


def test_file_with_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    run, impl = load_config(Run, path, ["optim.name=adamw", "steps=20", "options.deep.x=[1, 2]"])
    assert run == Run(
        steps=20,
        optim=Optim("adamw", 1.0, (0.8, 0.9)),
        note="first",
        stages=(Optim("adamw"),),
        options={"deep": {"x": [1, 2]}},
    )
    assert isinstance(run.optim.lr, float)
    assert impl == {"attention.kda": "kda.reference"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 1}, "step: unknown key. Did you mean 'steps'"),
        ({"steps": 1, "optim": {"lrr": 1.0}}, "optim.lrr: unknown key. Did you mean 'lr'"),
        ({"steps": 1, "qqqq": 1}, "Known keys: note, optim, options, stages, steps"),
        ({}, "steps: is missing"),
        ({"steps": 1.5}, "steps: 1.5 is not accepted, allowed: an integer"),
        ({"steps": True}, "steps: True is not accepted"),
        ({"steps": 1, "note": 3}, "note: 3 is not accepted, allowed: a string"),
        ({"steps": 1, "optim": 3}, "optim: 3 is not accepted, allowed: a table"),
        ({"steps": 1, "optim": {"name": "sgd"}}, "optim.name: 'sgd'.*'muon' or 'adamw'"),
        ({"steps": 1, "optim": {"betas": [1.0]}}, "optim.betas.*a list of 2"),
        ({"steps": 1, "stages": [{}, {"lr": "x"}]}, r"stages\[1\].lr: 'x'"),
    ],
)
def test_errors_name_the_key_and_the_remedy(values, message):
    with pytest.raises(ConfigError, match=message):
        load_dataclass(Run, values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ('"3"', "3"),
        ("plain", "plain"),
        ("a=b", "a=b"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_override_values(text, value):
    assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_leave_the_source_alone_and_refuse_nonsense():
    source = {"a": {"b": 1}, "c": 2}
    assert apply_overrides(source, ["a.b=5"])["a"] == {"b": 5} and source["a"] == {"b": 1}
    for bad in ("a.b", "=1", "a..b=1"):
        with pytest.raises(ConfigError, match="not key=value"):
            apply_overrides(source, [bad])
    with pytest.raises(ConfigError, match="c is 2, not a table"):
        apply_overrides(source, ["c.d=1"])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(Run, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(Run, tmp_path / "bad.toml")
