"""Measures against what they are defined by, and the recall tasks."""

import random

import pytest
import torch
from torch.nn import functional as F

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_train.data.sampler import Batch
from k3_train.study.measure import from_rows, from_snapshots, score, state_bytes
from k3_train.study.recall import FIRST_KEY, FIRST_VALUE, build_recall, draw


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(0)
    return K3ForConditionalGeneration(K3Config.preset("k3-test"), generator=generator).eval()


def test_the_score_is_the_mean_over_labels_that_count_in_all_batches(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (12,), generator=generator)
    labels = ids.roll(-1)
    labels[2] = labels[6] = -100
    batches = [Batch(ids[:5], labels[:5], (5,)), Batch(ids[5:], labels[5:], (3, 4))]
    loss, accuracy = score(model, batches)
    parts = [ids[:5], ids[5:8], ids[8:]]
    with torch.no_grad():
        logits = torch.cat(
            [model.forward_packed(p, SequenceBatch.from_lengths([len(p)])).logits for p in parts]
        )
    kept = labels != -100
    assert loss == pytest.approx(float(F.cross_entropy(logits[kept], labels[kept])), rel=1e-4)
    assert accuracy == float((logits[kept].argmax(-1) == labels[kept]).float().mean())


def test_state_bytes_are_those_of_a_cache(model):
    cache = model.new_cache(1, max_length=100)
    kda = cache.kda_state(0).nbytes + cache.conv_state(0).nbytes // 2  # bfloat16 when served
    (latent,) = cache._latents.values()
    assert state_bytes(model, 100) == kda + latent.nbytes // 2


def test_measures_of_rows():
    rows = [
        {"tokens": 10 * i, "loss": float(i), "grad_norm": 1.0, "tokens_per_s": float(i),
         "max_over_mean_load": load, "dead_experts": i}
        for i, load in enumerate([9.0, 2.0, 9.0, 1.9, 1.5, 1.2, 1.2, 1.2], 1)
    ]  # fmt: skip
    found = from_rows(rows, load_floor=1.5)
    assert found["balanced_at"] == 40
    assert (found["train_loss"], found["max_over_mean_load"], found["dead_experts"]) == (
        7.5,
        1.2,
        7.5,
    )
    assert from_rows(rows, load_floor=1.0)["balanced_at"] == 60
    assert from_rows(rows, load_floor=0.5)["balanced_at"] == float("inf")


def test_measures_of_snapshots_take_the_newest_of_each_kind():
    outputs = {"out_max": {"mlp": [1.0, 8.0]}, "out_rms": {"mlp": [0.5, 1.0]}}
    first = outputs | {"update_norm": {"q": [1.0, 3.0], "k": [2.0, 2.0]}}
    assert from_snapshots([first, outputs]) == {
        "activation_max": 8.0, "depth_rms": 2.0, "head_spread": 2.0,
    }  # fmt: skip


def test_every_asked_value_of_a_recall_task_can_be_looked_up():
    ids, mask = draw(random.Random(5), 8, bos=300)
    assert ids[0] == 300
    assert len(ids) == len(mask) == 33
    told = dict(zip(ids[1:17:2], ids[2:17:2], strict=True))
    asked = dict(zip(ids[17::2], ids[18::2], strict=True))
    assert asked == told
    assert list(asked) != list(told)
    assert len(told) == 8
    assert all(FIRST_KEY <= k < FIRST_VALUE <= v < 256 for k, v in told.items())
    assert [i for i, flag in enumerate(mask) if flag] == list(range(18, 33, 2))


def test_recall_files_hold_as_many_tokens_as_asked_for_and_depend_on_the_seed(tmp_path):
    make = {"num_pairs": 4, "num_tokens": 100, "vocab_size": 512, "bos": 256}
    one, other = (build_recall(tmp_path / str(s), seed=s, **make) for s in (0, 1))
    assert 100 <= one.num_tokens <= 100 + 17
    assert one.tokens.tolist() != other.tokens.tolist()
