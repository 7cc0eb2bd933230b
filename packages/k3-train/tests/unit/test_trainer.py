"""The loop: exact resume, accumulation, bad losses, rows (training 5, 7)."""

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3_core.model import SequenceBatch
from k3_train.data.sampler import Batch
from k3_train.loop.checkpoint import CheckpointError, load, newest
from k3_train.loop.log import NonFiniteLossError

KEYS = [
    "step",
    "tokens",
    "loss",
    "lr",
    "tokens_per_s",
    "grad_norm",
    "max_over_mean_load",
    "dead_experts",
    "mtp_loss",
    "max_logit",
    "clipped_heads",
]


def assert_same(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


@pytest.mark.parametrize(
    ("optimizer", "balancer"),
    [
        ("per_head_muon", "quantile_histogram"),
        ("adamw", "quantile_exact"),
        ("muon", "sign"),
        ("adamw", "auxiliary"),
    ],
)
def test_three_and_three_steps_equal_six_in_every_tensor(
    tmp_path, make_trainer, optimizer, balancer, run
):
    settings = (f"optim.name='{optimizer}'", f"balance.name='{balancer}'", "run.accumulation=2")
    straight = make_trainer(tmp_path / "straight", *settings)
    run(straight, 6)
    run(make_trainer(tmp_path / "parts", *settings), 3)
    torch.manual_seed(99)
    resumed = make_trainer(tmp_path / "parts", *settings, "run.seed=5")
    resumed.resume()
    assert resumed.state.step == 3
    run(resumed, 6)
    assert_same(straight.state.tensors(), resumed.state.tensors())
    files = [load(newest(one.checkpoints)) for one in (straight, resumed)]
    assert_same(files[0][0], files[1][0])
    assert files[0][1] == files[1][1]


def test_every_trained_parameter_moves_and_the_biases_too(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}
    run(trainer, 2)
    unused = "layers.0.self_attention_res"  # nothing to mix before the first layer
    still = [
        name
        for name, param in trainer.state.model.named_parameters()
        if torch.equal(param, before[name]) and unused not in name
    ]
    assert not still


def test_the_loss_falls(tmp_path, make_trainer, run):
    class Constant:
        def batch(self, step, micro=0):
            ids = torch.arange(24) % 12
            return Batch(ids, (ids + 1) % 12, (24,))

    run(make_trainer(tmp_path, sampler=Constant()), 6)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


class Recorder:
    """An optimizer that keeps the gradients it is given."""

    def __init__(self, params):
        self.params = params

    def step(self, lr_factor):
        self.grads = {n: p.grad.clone() for n, p in self.params.items() if p.grad is not None}


def gradients(trainer, batches):
    recorder = Recorder(dict(trainer.state.model.named_parameters()))
    trainer.state.optimizer = recorder
    metrics, norm = trainer.stepper.step(batches, 1.0)
    return recorder.grads, metrics, norm, dict(trainer.state.model.named_parameters())


@pytest.mark.parametrize("mtp_weight", [0.0, 0.5])
def test_accumulation_equals_one_big_batch_with_unequal_labels(tmp_path, make_trainer, mtp_weight):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 512, (30,), generator=generator)
    labels = torch.randint(0, 512, (30,), generator=generator)
    labels[:8] = -100
    labels[13] = -100
    lengths = [(10,), (5, 0, 15)]
    parts = [Batch(ids[:10], labels[:10], lengths[0]), Batch(ids[10:], labels[10:], lengths[1])]
    whole = [Batch(ids, labels, lengths[0] + lengths[1])]
    settings = (f"model.mtp_weight={mtp_weight}", "optim.clip_norm=0.05")
    got = gradients(make_trainer(tmp_path / "parts", *settings), parts)
    want = gradients(make_trainer(tmp_path / "whole", *settings), whole)
    torch.testing.assert_close(got[0], want[0], atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(got[1:3], want[1:3])
    assert ("mtp_loss" in got[1]) == (mtp_weight > 0)
    bias = "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    torch.testing.assert_close(got[3][bias], want[3][bias], atol=1e-5, rtol=0)


def test_without_weight_the_mtp_layer_is_neither_run_nor_changed(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path, "model.mtp_weight=0.0")
    before = {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}
    run(trainer, 1)
    mtp = "language_model.model.layers.2."
    own = [name for name in before if name.startswith(mtp)]
    assert own
    for name, param in trainer.state.model.named_parameters():
        is_same = torch.equal(param, before[name])
        assert is_same or name not in own, name
    (row,) = (json.loads(line) for line in trainer.rows_path.read_text().splitlines())
    assert row["mtp_loss"] == 0


def test_biases_move_once_a_step_and_not_at_every_micro_batch(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "balance.name=sign", "balance.sign_rate=0.01")
    bias_E = trainer.state.balancer.biases[0]
    assert not bias_E.any()
    gradients(trainer, [trainer.sampler.batch(0, micro) for micro in range(4)])
    assert 0 < bias_E.abs().max() < 2 * 0.01


def test_an_auxiliary_loss_weighs_as_much_as_the_loss_of_its_micro_batch(tmp_path, make_trainer):
    """Its part of the gradients of a step is the mean over equal micro-batches."""
    router = "language_model.model.layers.1.block_sparse_moe.gate.weight"

    def part_of(name, batches):
        grads = []
        for weight in (0.0, 10.0):
            settings = ("balance.name=auxiliary", f"balance.auxiliary_weight={weight}")
            trainer = make_trainer(tmp_path / f"{name}{weight}", *settings, "optim.clip_norm=0.0")
            grads.append(gradients(trainer, batches)[0][router])
        assert (grads[1] - grads[0]).abs().max() > 1e-4
        return grads[1] - grads[0]

    sampler = make_trainer(tmp_path / "sampler").sampler
    first, second = sampler.batch(0), sampler.batch(1)
    both = part_of("both", [first, second])
    alone = part_of("first", [first]) + part_of("second", [second])
    torch.testing.assert_close(both, alone / 2, atol=1e-5, rtol=1e-3)


def test_gradients_are_clipped_to_the_global_norm(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "optim.clip_norm=0.01")
    grads, _, norm, _ = gradients(trainer, [trainer.sampler.batch(0)])
    assert norm > 0.01
    clipped = sum(float(grad.double().pow(2).sum()) for grad in grads.values()) ** 0.5
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_evaluation_does_not_enter_the_balance(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path)
    batch = trainer.sampler.batch(0)
    packed = SequenceBatch.from_lengths(batch.seqlens)
    model, balancer = trainer.state.model, trainer.state.balancer
    model.eval()
    model.forward_packed(batch.input_ids, packed)
    assert not balancer.state_tensors()["counts"].any()
    model.train()
    model.forward_packed(batch.input_ids, packed)
    assert int(balancer.state_tensors()["num_tokens"].sum()) == 24


@pytest.mark.parametrize("balancer", ["quantile_histogram", "quantile_exact", "sign"])
def test_padding_and_recomputation_do_not_enter_balance_and_loads(tmp_path, make_trainer, balancer):
    trainer = make_trainer(tmp_path, f"balance.name='{balancer}'")
    model, balance, loads = trainer.state.model, trainer.state.balancer, trainer.loads
    batch = trainer.sampler.batch(0)
    mask_T = torch.arange(24) < 20
    packed = SequenceBatch.from_lengths(batch.seqlens, is_counted_T=mask_T)

    def loss_of(ids_T, labels_T):
        return model.training_loss(ids_T, labels_T, packed)[0]

    ids_T, labels_T = batch.input_ids, batch.labels
    checkpoint(loss_of, ids_T, labels_T, use_reentrant=False).backward()
    observed = balance.state_tensors()
    top_k = model.config.text.num_experts_per_token
    assert int(loads.counts_LE.sum()) == 20 * top_k
    if balancer == "quantile_histogram":
        assert int(observed["num_tokens"].sum()) == 20
    elif balancer == "sign":
        assert int(observed["counts.0"].sum()) == 20 * top_k
    else:
        assert [len(required_TE) for required_TE in observed.values()] == [20]


def test_a_bad_loss_is_an_error_that_names_its_step_and_saves_nothing(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path, "run.log_every=10")
    run(trainer, 2)
    saved = newest(trainer.checkpoints)
    with torch.no_grad():
        trainer.state.model.language_model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match="not finite at step 3"):
        run(trainer, 5)
    assert newest(trainer.checkpoints) == saved


def test_rows_have_their_keys_in_order_and_resumed_rows_are_not_doubled(
    tmp_path, make_trainer, run
):
    trainer = make_trainer(tmp_path, "run.checkpoint_every=2", "run.log_every=1")
    printed = run(trainer, 4)
    rows = [json.loads(line) for line in trainer.rows_path.read_text().splitlines()]
    assert [list(row) for row in rows] == [KEYS] * 4
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["tokens"] for row in rows] == [24, 48, 72, 96]
    assert "step 4/4" in printed
    assert "\x1b" not in printed
    newest(trainer.checkpoints).rename(tmp_path / "lost")
    again = make_trainer(tmp_path)
    again.resume()
    assert again.state.step == 2
    run(again, 4)
    rows = [json.loads(line) for line in trainer.rows_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_measuring_the_pace_leaves_the_state_as_it_was(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path)
    run(trainer, 1)
    before = {name: tensor.clone() for name, tensor in trainer.state.tensors().items()}
    assert trainer.measure_step_seconds(1) > 0
    assert_same(before, trainer.state.tensors())
    assert trainer.state.step == 1


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, make_trainer, run):
    run(make_trainer(tmp_path), 1)
    other = make_trainer(tmp_path)
    linear = other.state.model.language_model.lm_head
    linear.weight = torch.nn.Parameter(torch.zeros(3, 32))
    with pytest.raises(CheckpointError, match=r"first model\.language_model\.lm_head\.weight"):
        other.resume()
