"""QK-Clip in the trainer: scores above tau come down to it, others keep their weights."""

import io
import json

import pytest
import torch

from k3_train.loop.progress import make_reporter
from k3_train.optim.cosine import CosineSchedule
from k3_train.optim.qk_clip import clip_factors

SCHEDULE = CosineSchedule(total_steps=8, warmup_ratio=0.25, min_lr_ratio=0.1)
FIXED = ("optim.muon_lr=0.0", "optim.adamw_lr=0.0", "optim.embedding_lr=0.0", "balance.name='none'")
"""With rates of zero only QK-Clip moves anything."""


def run(trainer, until):
    trainer.run(until, SCHEDULE, make_reporter(until, io.StringIO()))
    return [json.loads(line) for line in trainer.rows_path.read_text().splitlines()]


class Repeated:
    """The first batch of a sampler, again and again."""

    def __init__(self, sampler):
        self.sampler = sampler

    def batch(self, step, micro=0):
        return self.sampler.batch(0, micro)


def mla_layers(trainer):
    return [one for one in trainer.state.model.modules() if hasattr(one, "scale_scores")]


def enlarge(trainer, factor):
    """Multiply the scores of the first head of each MLA layer."""
    for layer in mla_layers(trainer):
        factor_H = torch.ones(layer.num_heads)
        factor_H[0] = factor
        layer.scale_scores(factor_H)


def test_a_head_above_tau_is_brought_to_tau_in_one_step(tmp_path, make_trainer):
    # Without the MTP layer, whose inputs change with the clipped layer before it.
    settings = ("run.accumulation=2", "optim.qk_clip_tau=0.5", "model.mtp_weight=0.0")
    trainer = make_trainer(tmp_path, *FIXED, *settings)
    trainer.sampler = Repeated(trainer.sampler)
    enlarge(trainer, 1e4)
    rows = run(trainer, 2)
    assert rows[0]["max_logit"] > 1
    assert rows[0]["clipped_heads"] == 1
    assert rows[1]["max_logit"] == pytest.approx(0.5, rel=1e-4)


def test_heads_below_tau_keep_their_weights_bit_for_bit(tmp_path, make_trainer):
    finals = []
    for tau in (0.0, 100.0):
        trainer = make_trainer(tmp_path / str(tau), f"optim.qk_clip_tau={tau}")
        rows = run(trainer, 2)
        assert ("max_logit" in rows[0]) == (tau > 0)
        finals.append({name: t.clone() for name, t in trainer.state.tensors().items()})
    assert rows[-1]["clipped_heads"] == 0
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_off_means_that_no_layer_is_observed(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "optim.qk_clip_tau=0.0")
    run(trainer, 1)
    assert all(layer.observer is None for layer in mla_layers(trainer))


def test_the_maximum_is_that_of_all_micro_batches(tmp_path, make_trainer):
    """A row of two micro-batches has the larger maximum of the two."""
    largest = []
    for micro in (0, 1):
        trainer = make_trainer(tmp_path / f"only{micro}", *FIXED)
        batch = trainer.sampler.batch(0, micro)
        trainer.sampler = Repeated(trainer.sampler)
        trainer.sampler.batch = lambda step, micro=0, batch=batch: batch
        largest.append(run(trainer, 1)[0]["max_logit"])
    both = run(make_trainer(tmp_path / "both", *FIXED, "run.accumulation=2"), 1)[0]["max_logit"]
    assert largest[0] != largest[1]
    assert both == pytest.approx(max(largest), rel=1e-6)


def test_training_with_clipping_resumes_bitwise(tmp_path, make_trainer):
    settings = ("optim.qk_clip_tau=1e-6",)
    straight = make_trainer(tmp_path / "straight", *settings)
    assert run(straight, 4)[-1]["clipped_heads"] > 0
    run(make_trainer(tmp_path / "parts", *settings), 2)
    resumed = make_trainer(tmp_path / "parts", *settings)
    resumed.resume()
    run(resumed, 4)
    left, right = straight.state.tensors(), resumed.state.tensors()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_the_scores_of_a_step_under_way_are_part_of_the_state(tmp_path, make_trainer):
    settings = (*FIXED, "run.accumulation=2", "optim.qk_clip_tau=1e-6")
    stopped, resumed = (make_trainer(tmp_path / name, *settings) for name in ("first", "second"))
    stopped.events.started(stopped)
    batches = [stopped.sampler.batch(0, micro) for micro in range(2)]
    stopped.stepper.accumulate(batches, until=1)
    resumed.state.restore(*stopped.state.snapshot())
    resumed.events.started(resumed)
    left, right = stopped.state.tensors(), resumed.state.tensors()
    assert (left["events.qk_clip.largest.0"] > 0).all()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_skipped_step_clips_nothing(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, *FIXED, "optim.qk_clip_tau=1e-6")
    before = {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}
    trainer.events.by_name["guard"].accepts = lambda trainer, metrics: False
    trainer.run(1, SCHEDULE, make_reporter(1, io.StringIO()))
    assert trainer.state.step == 1
    named = trainer.state.model.named_parameters()
    assert [name for name, p in named if not torch.equal(p, before[name])] == []
    assert (trainer.state.tensors()["events.qk_clip.largest.0"] == -torch.inf).all()


def test_factors_are_tau_over_the_score_and_one_where_it_is_not_finite():
    largest_H = torch.tensor([50.0, 100.0, 400.0, float("inf"), float("nan"), float("-inf")])
    assert clip_factors(largest_H, 100.0).tolist() == [1, 1, 0.25, 1, 1, 1]
