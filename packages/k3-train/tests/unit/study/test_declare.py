"""Studies as data: what ships is complete, names are checked, variants and scales combine."""

import pytest
import torch

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_train.study.declare import Arm, load_study, scale_names, study_names
from k3_train.study.settings import check_arm, job_of, model_config, train_config

OWN = """
title = "t"
question = "q"
shown = ["loss"]
arms = [{ name = "a", model = { num_experts = 8 } }, { name = "b" }]
variants = [{ name = "big", model = { num_experts = 32 }, rates = [2.0] }, { name = "base" }]
scales = { tiny = { seeds = 4, model = { hidden_size = 48 } } }
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_the_studies_of_the_issue_are_there_with_their_arms():
    arms = {name: [arm.name for arm in load_study(name).all_arms()] for name in study_names()}
    assert len(arms["balance"]) == 14
    assert arms["balance"][:3] == ["none/64", "sign-1e-2/64", "qb-histogram/64"]
    assert arms["kda_ratio"] == ["0-1", "1-1", "3-1", "7-1", "15-1"]
    assert arms["depth_mixing"] == ["residual", "block", "full"]
    assert arms["latent_moe"] == ["full-width", "latent-no-norm", "latent-norm"]
    assert [one for one in arms["activation"] if one.endswith("/x10")] == [
        "swiglu/x10", "clamped/x10", "situ/x10",
    ]  # fmt: skip
    assert arms["optimizer"] == ["adamw", "muon", "per-head-muon"]
    assert arms["schedule"] == ["cosine", "wsd"]


@pytest.mark.parametrize("name", study_names())
@pytest.mark.parametrize("scale", scale_names())
def test_every_arm_of_every_study_has_a_model_at_every_scale(name, scale):
    study = load_study(name)
    for arm in study.all_arms():
        model_config(arm, study.scale(scale))


def test_the_cpu_scale_is_that_of_the_issue():
    scale = load_study("depth_mixing").scale("cpu")
    text = model_config(Arm("x"), scale).text
    shape = (scale.tokens, text.hidden_size, text.num_hidden_layers, scale.set["data.max_seq_len"])
    assert shape == (100_000, 64, 4, 128)


@pytest.mark.parametrize(("ratio", "layers"), [(0, (1, 2, 3, 4)), (1, (2, 4)), (3, (4,)), (7, ())])
def test_a_ratio_places_the_mla_layers(ratio, layers):
    arm = Arm("x", model={"kda_per_mla": ratio})
    linear = model_config(arm, load_study("depth_mixing").scale("cpu")).text.linear_attn_config
    assert linear.full_attn_layers == layers


def test_none_is_null_and_a_field_at_one_scale_is_of_that_scale():
    study = load_study("latent_moe")
    arm = study.chosen(["full-width"])[0]
    texts = [model_config(arm, study.scale(name)).text for name in ("cpu", "h200")]
    assert [text.routed_expert_hidden_size for text in texts] == [None, None]
    assert [text.moe_intermediate_size for text in texts] == [28, 192]


def test_variants_add_to_arms_and_a_study_changes_its_scale(own):
    study = load_study(str(own))
    assert [arm.name for arm in study.all_arms()] == ["a/big", "b/big", "a/base", "b/base"]
    first, *_, last = study.all_arms()
    assert (first.model, first.rates, last.model) == ({"num_experts": 32}, (2.0,), {})
    scale = study.scale("tiny")
    assert (scale.seeds, scale.model["hidden_size"], scale.model["num_experts"]) == (4, 48, 4)
    assert [arm.name for arm in study.chosen(["b", "a/base"])] == ["b/big", "a/base", "b/base"]


def test_unknown_names_are_refused_with_what_there_is(own, tmp_path):
    study = load_study(str(own))
    with pytest.raises(K3Error, match=r"no arm 'c'; there are: a/big, b/big"):
        study.chosen(["c"])
    with pytest.raises(K3Error, match=r"no scale 'tine' \(did you mean 'tiny'\?\)"):
        study.scale("tine")
    with pytest.raises(K3Error, match=r"no study 'balence' \(did you mean 'balance'\?\)"):
        load_study("balence")
    own.write_text(OWN.replace('name = "b"', 'name = "a"'))
    with pytest.raises(ConfigError, match="two have one name"):
        load_study(str(own))


@pytest.mark.parametrize(
    ("arm", "missing"),
    [
        (Arm("odd", set={"balance.name": "magic"}), "no plugin declares the balancer 'magic'"),
        (Arm("odd", set={"schedule.name": "stairs"}), "no plugin declares the schedule 'stairs'"),
        (Arm("odd", set={"run.events": ["bell"]}), "no plugin declares the trainer_event 'bell'"),
        (Arm("odd", set={"optim.speed": 1}), "optim.speed: unknown key"),
        (Arm("odd", model={"hiden_size": 1}), "Perhaps 'hidden_size'"),
    ],
)
def test_an_arm_that_cannot_run_is_an_error_that_names_it(arm, missing):
    with pytest.raises(K3Error, match="arm odd of this study cannot run") as error:
        check_arm(arm, load_study("balance").scale("tiny"))
    assert missing in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_scale_of_a_gpu_is_refused_at_once_without_one():
    with pytest.raises(K3Error, match=r"arm a .* no GPU is usable"):
        check_arm(Arm("a"), load_study("balance").scale("h200"))


def test_a_run_is_identified_by_everything_that_the_study_states(own):
    scale = load_study(str(own)).scale("tiny")
    base = job_of(Arm("a"), scale, "full", 1.0, 0)
    assert base.digest == job_of(Arm("a"), scale, "full", 2.0, 1).digest
    others = [
        job_of(Arm("a", set={"optim.momentum": 0.9}), scale, "full", 1.0, 0),
        job_of(Arm("a", model={"num_experts": 8}), scale, "full", 1.0, 0),
        job_of(Arm("a", tokens=2.0), scale, "full", 1.0, 0),
        job_of(Arm("a"), scale, "search", 1.0, 0),
    ]
    assert len({base.digest, *(job.digest for job in others)}) == 5
    assert others[2].tokens == 2 * base.tokens


def test_the_settings_of_a_run_have_its_rate_length_and_seed(tmp_path):
    scale = load_study("depth_mixing").scale("cpu")
    arm = Arm("a", set={"schedule.name": "cosine"})
    job = job_of(arm, scale, "full", 0.5, 3)
    config = train_config(arm, scale, job, tmp_path / "data", tmp_path / "run")
    assert (config.optim.muon_lr, config.optim.adamw_lr) == pytest.approx((0.01, 0.003))
    assert (config.run.steps, config.schedule.total_steps, config.run.seed) == (49, 49, 3)
    assert (tmp_path / "run/config.json").is_file()
