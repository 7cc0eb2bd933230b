"""Every policy, alone and with others: the same gradients from less memory (report 7.2)."""

import copy
import io
import warnings

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from k3_train.loop.progress import make_reporter
from k3_train.memory import fp8, offload
from k3_train.memory.recompute import Recompute
from k3_train.optim.cosine import CosineSchedule

SUBLAYERS = {f"layers.*.{name}": "recompute" for name in ("self_attn", "mlp", "block_sparse_moe")}
POINTWISE = {
    f"op:{op}": "recompute"
    for op in ("rms_norm", "gated_rms_norm", "situ_glu", "depth_read", "attn_res", "short_conv")
}
EXACT = {
    "keep": {"layers.*": "keep"},
    "recompute": SUBLAYERS,
    "recompute whole": {"language_model.model": "recompute"},
    "recompute ops": POINTWISE,
    "offload": {"language_model.model": "offload", "op:linear_cross_entropy": "offload"},
    "keep inside offload": {"layers.*": "offload", "layers.*.self_attn": "keep"},
    "recompute inside offload": {**SUBLAYERS, **POINTWISE, "layers.*": "offload"},
    "recompute and offload": {"layers.*.self_attn": ["offload", "recompute"]},
}
ROUNDED = {
    "fp8": {"layers.*": "fp8"},
    "fp8 everywhere": {"language_model.model": "fp8", "op:linear_cross_entropy": "fp8"},
    "fp8 and offload": {"layers.*": ["offload", "fp8"]},
    "fp8 inside offload": {"layers.*.block_sparse_moe": "fp8", "layers.*": "offload"},
    "all": {**SUBLAYERS, "layers.*": ["fp8", "offload"]},
    "as the report": {**POINTWISE, "layers.*": ["fp8", "offload"]},
}


@pytest.fixture
def small(monkeypatch):
    """Small tensors too are packed."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(fp8, "MIN_VALUES", 1)


@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("table", EXACT.values(), ids=EXACT)
def test_policies_that_round_nothing_give_the_same_bits(make_run, plain, small, table, is_autocast):
    loss, grads = make_run(table, is_autocast=is_autocast).gradients()
    expected, expected_grads = plain[is_autocast]
    assert loss == expected
    assert grads.keys() == expected_grads.keys()
    assert [name for name in grads if not torch.equal(grads[name], expected_grads[name])] == []


@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("table", ROUNDED.values(), ids=ROUNDED)
def test_gradients_from_fp8_have_the_direction_of_the_exact_ones(
    make_run, plain, table, is_autocast
):
    loss, grads = make_run(table, is_autocast=is_autocast).gradients()
    expected, expected_grads = plain[is_autocast]
    assert loss == expected
    assert grads.keys() == expected_grads.keys()
    pairs = [(grads[name].double(), grad.double()) for name, grad in expected_grads.items()]
    whole = [torch.cat([x.flatten() for x in own]) for own in zip(*pairs, strict=True)]
    assert _cosine(*whole) > 0.999
    matrices = [(a.flatten(), b.flatten()) for a, b in pairs if b.dim() > 1 and b.any()]
    assert min(_cosine(a, b) for a, b in matrices) > 0.995


def _cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def test_recomputed_from_rounded_inputs_a_router_chooses_the_same_experts(make_run, plain):
    _, grads = make_run({**SUBLAYERS, "layers.*": "fp8"}).gradients()
    expected_grads = plain[False][1]
    experts = [name for name in grads if ".experts." in name]
    assert experts
    for name in experts:
        # One token among other experts would cost a hundred times that.
        assert _cosine(grads[name].flatten(), expected_grads[name].flatten()) > 0.999


@pytest.mark.parametrize("name", ["keep", "recompute inside offload", "all", "as the report"])
def test_a_step_leaves_nothing_behind(make_run, make_census, name):
    run = make_run((EXACT | ROUNDED)[name])
    with make_census(run.model.parameters()) as census:
        run.loss().backward()
        run.model.zero_grad()
        assert census.num_bytes() < 100_000


def _bytes_between(run, make_census):
    """Bytes that are alive between forward and backward."""
    with make_census(run.model.parameters()) as census:
        loss = run.loss()
        num_bytes = census.num_bytes()
    del loss
    return num_bytes


@pytest.mark.parametrize(
    ("name", "share"),
    [("recompute", 0.3), ("recompute ops", 0.8), ("fp8", 0.6), ("as the report", 0.45)],
)
def test_less_is_kept_between_forward_and_backward(make_run, make_census, name, share):
    kept = _bytes_between(make_run({}), make_census)
    assert kept > 2_500_000
    assert _bytes_between(make_run((EXACT | ROUNDED)[name]), make_census) < share * kept


def test_offload_leaves_next_to_nothing_on_the_device(make_run, make_census, small, monkeypatch):
    host = []

    class Moved(offload._Moved):
        def __init__(self, *args):
            super().__init__(*args)
            storage = self._host_N.untyped_storage()
            host.append((StorageWeakRef(storage), storage.nbytes()))

    kept = _bytes_between(make_run({}), make_census)
    monkeypatch.setattr(offload, "_Moved", Moved)
    table = dict.fromkeys(
        ["language_model.model", "layers.*", "op:linear_cross_entropy"], "offload"
    )
    run = make_run(table)
    with make_census(run.model.parameters()) as census:
        loss = run.loss()
        on_host = sum(size for one, size in host if not one.expired())
        left = census.num_bytes() - on_host
    del loss
    assert on_host > 0.8 * kept
    assert left < 0.1 * kept


def test_a_run_under_policies_is_the_run_without(tmp_path, make_trainer, small):
    tables = {"plain": "{}", "annotated": '{"layers.*" = "offload", "op:rms_norm" = "recompute"}'}
    tables["annotated"] = (
        tables["annotated"][:-1]
        + "".join(f', "{key}" = "{value}"' for key, value in SUBLAYERS.items() if "mlp" not in key)
        + "}"
    )
    states = []
    for name, table in tables.items():
        trainer = make_trainer(tmp_path / name, f"memory={table}", "run.accumulation=2")
        schedule = CosineSchedule(total_steps=4, warmup_ratio=0.25, min_lr_ratio=0.1)
        trainer.run(2, schedule, make_reporter(2, io.StringIO()))
        states.append(trainer.state.tensors())
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_entries_that_change_nothing_are_named_after_the_first_step(tmp_path, make_trainer):
    table = (
        '{"layers.*.input_layernorm" = "recompute", "layers.*" = "keep", "op:kda_step" = "keep"}'
    )
    trainer = make_trainer(tmp_path, f"memory={table}")
    schedule = CosineSchedule(total_steps=4, warmup_ratio=0.25, min_lr_ratio=0.1)
    with pytest.warns(UserWarning, match=r"not call layers\.1\.input_layernorm, op:kda_step, so"):
        trainer.run(1, schedule, make_reporter(1, io.StringIO()))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"\[memory\]")
        trainer.run(2, schedule, make_reporter(2, io.StringIO()))


def test_what_runs_again_draws_the_same_random_numbers():
    def noisy(x):
        return torch.nn.functional.dropout(x * x, 0.5)

    grads = []
    for call in (noisy, lambda x: Recompute(torch.device("cpu")).call(noisy, x)):
        torch.manual_seed(7)
        x = torch.ones(1000, requires_grad=True)
        y = call(x)
        torch.rand(3)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert 0 < int((grads[0] == 0).sum()) < 1000


def test_a_list_that_grows_is_read_as_it_was():
    def total(parts):
        return sum(part * part for part in parts)

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    parts = [x * 3]
    y = Recompute(torch.device("cpu")).call(total, parts)
    parts.append(torch.ones(5))
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([18.0, 36.0]))


def test_the_graph_can_be_walked_twice(make_run, plain, small):
    run = make_run(ROUNDED["as the report"] | {"layers.*": "offload"})
    loss = run.loss()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    run.model.zero_grad()
    loss.backward()
    second = dict(run.model.named_parameters())
    assert all(torch.equal(grad, second[name].grad) for name, grad in first.items())
    assert all(torch.equal(grad, first[name]) for name, grad in plain[False][1].items())


def test_a_copy_of_the_model_runs_itself(make_run):
    run = make_run(SUBLAYERS)
    other = copy.deepcopy(run.model)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(float("nan"))
    run.model = other
    loss, _ = run.gradients()
    assert torch.isfinite(loss)
