"""The table `[memory]`: what fits, which entry counts, and what is refused."""

import pytest

from k3_core.config import ConfigError
from k3_core.errors import ImplUnavailable
from k3_train.config import load_train_config, write_toml
from k3_train.memory.patterns import match_modules

NAMES = ["layers.0", "layers.1", "layers.0.mlp", "layers.1.self_attn", "vision_tower.blocks.0"]


def test_wildcards_stand_for_parts_of_one_component():
    assert match_modules(["layers.*"], NAMES) == {"layers.0": "layers.*", "layers.1": "layers.*"}
    assert match_modules(["layers.[1-9].self_*"], NAMES) == {
        "layers.1.self_attn": "layers.[1-9].self_*"
    }


@pytest.mark.parametrize("keys", [["layers.*", "layers.1"], ["layers.1", "layers.*"]])
def test_the_exception_counts_in_any_order(keys):
    assert match_modules(keys, NAMES) == {"layers.0": "layers.*", "layers.1": "layers.1"}


def test_two_that_say_as_much_are_refused():
    with pytest.raises(ConfigError, match=r"layers\.1 is also meant by 'layers\.\*'"):
        match_modules(["layers.*", "layers.[1-3]"], NAMES)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"layers.*.self_atn": "keep"},
            r"memory\.\"layers\.\*\.self_atn\".*'layers\.\*\.self_attn'",
        ),
        ({"layers.7": "keep"}, r"no module has such a name.*Did you mean 'layers\.\*'"),
        ({"op:situ": "keep"}, r"Did you mean 'op:situ_glu'"),
        ({"layers.*": 3}, "3 is not accepted"),
        ({"layers.*": []}, "a list of names"),
        ({"layers.*": "recompute"}, r"layers\.0 changes its arguments.*layers\.\*\.self_attn"),
        ({"layers.*.self_attn.q_conv1d": "keep"}, "is never called"),
        ({"layers.*.block_sparse_moe": ["fp8", "recompute"]}, "routes, so what it runs again"),
        ({"op:route_topk": "recompute"}, "counts for the balancer"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_what_can(make_run, table, message):
    with pytest.raises(ConfigError, match=message):
        make_run(table)


def test_an_unknown_policy_is_named(make_run):
    with pytest.raises(ImplUnavailable, match="fp9"):
        make_run({"layers.*": "fp9"})


def test_the_table_is_read_as_it_was_written(tmp_path):
    config = load_train_config(
        overrides=['memory={"layers.*" = ["fp8", "offload"], "op:situ_glu" = "recompute"}']
    )
    assert config.memory == {"layers.*": ["fp8", "offload"], "op:situ_glu": "recompute"}
    write_toml(config, tmp_path / "resolved.toml")
    assert load_train_config(file=tmp_path / "resolved.toml") == config
