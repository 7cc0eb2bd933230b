"""Snapshots of a run: what they hold, when they are taken, that they change nothing."""

import json

import pytest
import torch

from k3_train.optim.roles import Role
from k3_train.report.diagnostics import head_norms

SETTINGS = ("diagnostics.every=2", "diagnostics.tokens=10")


def snapshots(folder):
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def test_snapshots_are_of_the_first_step_of_every_second_row_and_of_the_end(
    tmp_path, make_trainer, run
):
    trainer = make_trainer(tmp_path, *SETTINGS)
    run(trainer, 5)
    found = snapshots(tmp_path)
    assert [one["step"] for one in found] == [1, 2, 4, 5]
    assert ["load" in one for one in found] == [True, True, True, False]
    assert found[0]["routers"] == [1, 2]  # the second layer and the MTP layer
    for load in found[2]["load"]:
        assert sum(load) == pytest.approx(4, abs=0.02)
    gate = trainer.state.model.language_model.model.layers[1].block_sparse_moe.gate
    torch.testing.assert_close(
        torch.tensor(found[-1]["bias"][0]), gate.e_score_correction_bias.detach(), rtol=1e-2, atol=0
    )


def test_update_norms_are_those_of_the_change_of_each_head(tmp_path, make_trainer, run):
    trainer = make_trainer(tmp_path, *SETTINGS)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    weight = trainer.state.model.get_parameter(name)
    before = weight.detach().clone()
    run(trainer, 1)
    change = weight.detach() - before
    wanted = [float(change[rows].norm()) for rows in (slice(0, 16), slice(16, 32))]
    assert snapshots(tmp_path)[0]["update_norm"][name] == pytest.approx(wanted, rel=1e-2)


def test_rows_of_keys_and_values_of_a_head_count_together():
    role = Role("mla_kv", "muon", True, blocks=2, rows=(1, 2))
    change = torch.tensor([[3.0], [0.0], [4.0], [1.0], [2.0], [2.0]])
    assert head_norms(role, change).tolist() == [5.0, 3.0]


def test_diagnostics_change_nothing_of_the_run(tmp_path, make_trainer, run):
    plain = make_trainer(tmp_path / "plain", "run.events=[]")
    watched = make_trainer(tmp_path / "watched", *SETTINGS)
    for trainer in (plain, watched):
        run(trainer, 3)
    left, right = plain.state.tensors(), watched.state.tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not (tmp_path / "plain/diagnostics.jsonl").exists()


def test_a_resumed_run_has_every_snapshot_once(tmp_path, make_trainer, run):
    first = make_trainer(tmp_path, *SETTINGS, "run.checkpoint_every=2")
    run(first, 4)
    (tmp_path / "checkpoints/step-00000004").rename(tmp_path / "lost")
    again = make_trainer(tmp_path, *SETTINGS)
    again.resume()
    run(again, 4)
    assert [one["step"] for one in snapshots(tmp_path)] == [1, 2, 4]


def test_the_head_of_a_batch_cuts_its_last_sequence(make_trainer, tmp_path):
    batch = make_trainer(tmp_path).sampler.batch(0)
    short = batch.head(10)
    assert short.seqlens == (7, 3)
    assert torch.equal(short.input_ids, batch.input_ids[:10])
    assert batch.head(99).seqlens == batch.seqlens
