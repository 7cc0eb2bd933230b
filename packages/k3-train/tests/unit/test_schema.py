"""`extends` in settings files, and the JSON schema of them."""

import dataclasses
import json
import tomllib

import jsonschema
import pytest

from k3_core.cli.app import run
from k3_core.config import ConfigError
from k3_train.config import RANGES, Stage, TrainConfig, load_train_config, write_toml
from k3_train.schema import config_schema, setting_docs

TABLES = ("impl", "curriculum")
SECTIONS = [one for one in dataclasses.fields(TrainConfig) if one.name not in TABLES]


def test_a_file_goes_over_the_one_that_it_extends(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/first.toml").write_text(
        "[run]\nseed = 1\nlog_every = 5\n[data]\nweights = { a = 1.0, b = 2.0 }\n"
        "[[curriculum]]\nname = 'only'\n"
    )
    (tmp_path / "base/second.toml").write_text(
        "extends = 'first.toml'\n[run]\nseed = 2\n[optim]\nmuon_lr = 0.5\n"
    )
    (tmp_path / "own.toml").write_text(
        "extends = 'base/second.toml'\n[data]\nweights = { c = 1.0 }\n[run]\nsteps = 9\n"
    )
    config = load_train_config(file=tmp_path / "own.toml", overrides=["run.steps=10"])
    assert (config.run.seed, config.run.log_every, config.run.steps) == (2, 5, 10)
    assert config.optim.muon_lr == 0.5
    assert config.data.weights == {"c": 1.0}  # a value is replaced whole
    assert config.curriculum == (Stage("only"),)
    write_toml(config, tmp_path / "config.resolved.toml")
    assert "extends" not in (tmp_path / "config.resolved.toml").read_text()


def test_a_circle_is_named(tmp_path):
    for name, base in {"a": "b", "b": "c", "c": "b"}.items():
        (tmp_path / f"{name}.toml").write_text(f"extends = '{base}.toml'\n")
    with pytest.raises(ConfigError, match=r"b\.toml -> .*c\.toml -> .*b\.toml. Break"):
        load_train_config(file=tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [("extends = 3", "not a path"), ("extends = 'absent.toml'", "no such file")],
)
def test_what_cannot_be_extended_is_named(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_train_config(file=tmp_path / "a.toml")


def test_the_schema_is_one_and_takes_what_is_written(tmp_path, capsys):
    assert run(["train", "config-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(config_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    stages = "curriculum=[{ name = 'a', steps = 3, lr_scale = 0.5 }, { name = 'b' }]"
    write_toml(load_train_config(preset="k3-nano", overrides=[stages]), tmp_path / "a.toml")
    written = tomllib.loads((tmp_path / "a.toml").read_text())
    jsonschema.validate({"extends": "base.toml", **written}, schema)


@pytest.mark.parametrize(
    "bad",
    [
        {"run": {"stepps": 3}},
        {"rum": {}},
        {"run": {"steps": "many"}},
        {"run": {"accumulation": 0}},
        {"guard": {"nonfinite": "perhaps"}},
        {"curriculum": [{"steps": 3}]},
    ],
)
def test_the_schema_refuses_what_reading_refuses(bad):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, config_schema())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda one: one.name)
def test_every_setting_is_described_with_its_default(section):
    cls = section.default_factory
    docs = setting_docs(cls)
    properties = config_schema()["properties"][section.name]["properties"]
    for one in dataclasses.fields(cls):
        assert len(docs.get(one.name, "")) > 2, f"{cls.__name__} does not describe {one.name}"
        assert "default" in properties[one.name]
    assert set(docs) == {one.name for one in dataclasses.fields(cls)}


def test_ranges_are_of_settings_that_exist():
    properties = config_schema()["properties"]
    for name, (low, _) in RANGES.items():
        section, key = name.split(".")
        assert properties[section]["properties"][key]["minimum"] == low
