"""The guard: a bad step is named by step, layer and op, and stopped, skipped or kept (row 29)."""

import json

import pytest
import torch

from k3_train.data.sampler import Batch
from k3_train.events.guard import SpikeError
from k3_train.events.trace import find_largest
from k3_train.loop.log import NonFiniteLossError

LAYER = "language_model.model.layers.1.self_attn"
COUNTS = {
    "balancer.counts",
    "balancer.num_tokens",
    "events.qk_clip.largest.0",
    "events.qk_clip.largest.1",
}


class Poison(torch.autograd.Function):
    """Returns its input; the gradient is divided by zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / torch.zeros(())


def poison(trainer, steps, change):
    """Change the result of a layer's module in the given steps, counted from 1."""
    module = trainer.state.model.get_submodule(LAYER)

    def hook(module, inputs, output):
        return change(output) if trainer.state.step + 1 in steps else None

    module.register_forward_hook(hook)


def state(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state.tensors().items()}


def different(left, right):
    assert left.keys() == right.keys()
    return {name for name in left if not torch.equal(left[name], right[name])}


def lines(folder):
    return [json.loads(line) for line in (folder / "guard.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "phase", "op"),
    [
        (lambda out: out.log() - out.log(), "forward", "aten.log.default"),
        (lambda out: out * 1e30 * 1e30, "forward", "aten.mul.Tensor"),
        (Poison.apply, "backward", "aten.div.Tensor"),
    ],
)
def test_a_bad_step_stops_and_is_named_by_layer_and_op(
    tmp_path, make_trainer, change, phase, op, run
):
    trainer = make_trainer(tmp_path, "run.accumulation=2", "guard.nonfinite=stop")
    poison(trainer, {3}, change)
    run(trainer, 2)
    before = state(trainer)
    with pytest.raises(NonFiniteLossError, match=f"not finite at step 3: .*{phase}.*{op}"):
        run(trainer, 5)
    (line,) = lines(tmp_path)
    assert (line["step"], line["kind"], line["action"]) == (3, "nonfinite", "stop")
    assert (line["phase"], line["op"]) == (phase, op)
    assert line["layer"].startswith("language_model.model.layers.1")
    assert different(before, state(trainer)) <= {*COUNTS, "events.guard.numbers"}


@pytest.mark.parametrize("balancer", ["quantile_histogram", "quantile_exact"])
def test_a_skipped_step_leaves_everything_but_the_count(tmp_path, make_trainer, balancer, run):
    settings = (f"balance.name='{balancer}'", "guard.nonfinite=skip", "run.log_every=1")
    trainer = make_trainer(tmp_path, *settings)
    poison(trainer, {2}, lambda out: out * float("nan"))
    run(trainer, 1)
    before = state(trainer)
    printed = run(trainer, 2)
    assert "not finite at step 2" in printed
    assert "(skipped)" in printed
    assert different(before, state(trainer)) == {"events.guard.numbers"}
    assert (trainer.state.step, trainer.state.tokens) == (2, 48)
    run(trainer, 3)
    assert different(before, state(trainer)) > {"events.guard.numbers"}
    rows = [json.loads(line) for line in trainer.rows_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3]  # there is no loss to report of step 2
    assert rows[-1]["skipped_steps"] == 1


def test_the_guards_state_is_resumed(tmp_path, make_trainer, run):
    settings = ("guard.nonfinite=skip", "guard.max_skips=2")
    straight = make_trainer(tmp_path / "straight", *settings)
    poison(straight, {2, 3}, lambda out: out * float("nan"))
    run(straight, 5)
    first = make_trainer(tmp_path / "parts", *settings)
    poison(first, {2, 3}, lambda out: out * float("nan"))
    run(first, 2)
    second = make_trainer(tmp_path / "parts", *settings)
    second.resume()
    poison(second, {2, 3}, lambda out: out * float("nan"))
    run(second, 5)
    assert not different(state(straight), state(second))
    assert second.events.by_name["guard"].numbers["num_skipped"] == 2


def test_too_many_skips_in_a_row_stop_the_run_also_over_a_resume(tmp_path, make_trainer, run):
    settings = ("guard.nonfinite=skip", "guard.max_skips=2")
    first = make_trainer(tmp_path, *settings)
    poison(first, {2, 3, 4}, lambda out: out * float("nan"))
    run(first, 3)
    second = make_trainer(tmp_path, *settings)
    second.resume()
    poison(second, {2, 3, 4}, lambda out: out * float("nan"))
    with pytest.raises(NonFiniteLossError, match="more than 2 in a row"):
        run(second, 5)


@pytest.mark.parametrize("action", ["note", "skip", "stop", "off"])
def test_a_spike_is_named_and_kept_skipped_or_stopped(tmp_path, make_trainer, action, run):
    settings = (f"guard.spike={action}", "guard.warmup_steps=2", "guard.spike_factor=5.0")
    trainer = make_trainer(tmp_path, *settings)
    poison(trainer, {4}, lambda out: out + (out - out.detach()) * 1e4)
    run(trainer, 3)
    before = state(trainer)
    if action == "stop":
        with pytest.raises(SpikeError, match="times its moving mean at step 4"):
            run(trainer, 4)
    else:
        run(trainer, 4)
    is_kept = action in ("note", "off")
    changed = different(before, state(trainer)) - {"events.guard.numbers", *COUNTS}
    assert bool(changed) == is_kept
    if action == "off":
        assert not (tmp_path / "guard.jsonl").exists()
    else:
        (line,) = lines(tmp_path)
        assert (line["kind"], line["step"], line["action"]) == ("spike", 4, action)
        assert line["layer"].startswith("language_model.model.")
        assert line["op"]


def test_looking_for_the_cause_changes_nothing(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "run.accumulation=2", "balance.name=quantile_exact")
    batches = [trainer.sampler.batch(0, micro) for micro in range(2)]
    trainer.stepper.accumulate(batches, until=2)
    before, loads = state(trainer), trainer.loads.counts_LE.clone()
    finding = find_largest(trainer)
    assert finding.layer
    assert finding.phase in ("forward", "backward")
    assert not different(before, state(trainer))
    assert torch.equal(loads, trainer.loads.counts_LE)


def test_without_a_guard_the_next_row_stops(tmp_path, make_trainer, run):
    class OneBad:
        def batch(self, step, micro=0):
            ids = torch.arange(24) % 12
            return Batch(ids, (ids + 1) % 12, (24,))

    settings = ("guard.nonfinite=off", "guard.spike=off", "run.log_every=10")
    trainer = make_trainer(tmp_path, *settings, sampler=OneBad())
    assert "guard" not in trainer.events.by_name
    poison(trainer, {2}, lambda out: out * float("nan"))
    with pytest.raises(NonFiniteLossError, match="not finite at step 2"):
        run(trainer, 4)
