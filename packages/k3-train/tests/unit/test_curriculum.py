"""The curriculum: streams that go on across stages, exact resume inside one, no leaks."""

import io
import json
from collections import Counter

import numpy as np
import pytest
import torch

from k3_core.config import ConfigError
from k3_core.model.batch import SequenceBatch
from k3_train.config import load_train_config, write_toml
from k3_train.data.token_file import TokenFileWriter
from k3_train.events.base import TrainerEvent
from k3_train.loop.build import build_schedule, build_trainer
from k3_train.loop.checkpoint import CheckpointError, load, newest
from k3_train.loop.corpus import open_sampler
from k3_train.loop.curriculum import Curriculum
from k3_train.loop.progress import make_reporter

VOCAB = 512


def stage(name, **values):
    written = "".join(f", {key} = {value}" for key, value in values.items())
    return f"{{ name = '{name}'{written} }}"


def staged(*stages):
    return f"curriculum=[{', '.join(stages)}]"


LENGTHS = (256, 1024, 4096)
STAGES = staged(
    stage("short", steps=2, max_seq_len=256, tokens_per_batch=512, accumulation=2),
    stage("middle", steps=3, max_seq_len=1024, tokens_per_batch=1024, lr_scale=0.5),
    stage("long", max_seq_len=4096, tokens_per_batch=4096, lr_scale=0.25),
)


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    """Two files of documents of 5 to 6,000 tokens; every token names its document."""
    folder = tmp_path_factory.mktemp("long")
    rng = np.random.default_rng(0)
    for name, lengths in {"a": (6000, 700, 40, 5, 4000, 900), "b": (300, 5000, 17, 60)}.items():
        with TokenFileWriter(
            folder / name, vocab_size=VOCAB, has_mask=False, sources={"kind": "test"}
        ) as writer:
            for length in lengths:
                writer.add(rng.integers(0, VOCAB, length), [length])
    return folder


def settings(tiny_settings, *overrides):
    return tiny_settings("data.weights={a = 0.75, b = 0.25}", *overrides)


@pytest.fixture(scope="module")
def numbered_data(tmp_path_factory):
    """Two files whose tokens are all different: 0 to 9,999 in "a", from 20,000 on in "b"."""
    folder = tmp_path_factory.mktemp("numbered")
    documents = {"a": (0, [4000, 7, 900, 93, 5000]), "b": (20_000, [3000, 500, 5000])}
    for name, (first, lengths) in documents.items():
        with TokenFileWriter(
            folder / name, vocab_size=40_000, has_mask=False, sources={"kind": "test"}
        ) as writer:
            writer.add(np.arange(first, first + sum(lengths)), lengths)
    return folder


def test_no_token_comes_twice_across_stages_before_its_file_was_read(numbered_data, tiny_settings):
    stages = staged(
        stage("short", steps=3, max_seq_len=8, tokens_per_batch=400, accumulation=2),
        stage("middle", tokens=5000, max_seq_len=64, tokens_per_batch=600, weights="{ b = 1.0 }"),
        stage("long", max_seq_len=512, tokens_per_batch=1000),
    )
    sampler = open_sampler(settings(tiny_settings, stages), numbered_data)
    spans = sampler.curriculum.spans
    assert [(span.first_step, span.num_steps) for span in spans] == [(0, 3), (3, 9), (12, 0)]
    seen: Counter[int] = Counter()
    for step in range(22):
        span = sampler.curriculum.at(step)
        for micro in range(span.accumulation):
            batch = sampler.batch(step, micro)
            assert max(batch.seqlens) <= span.max_seq_len
            assert sum(batch.seqlens) == span.tokens_per_batch
            seen.update(batch.input_ids.tolist())
    assert set(seen.values()) == {1}
    read = {"a": 3 * 2 * 300 + 10 * 750, "b": 3 * 2 * 100 + 9 * 600 + 10 * 250}
    assert sum(token < 20_000 for token in seen) == read["a"]  # 9,300 of 10,000
    assert sum(token >= 20_000 for token in seen) == read["b"]  # all of its 8,500
    streams = sampler.position(22)["streams"]
    assert {name: stream["offset"] for name, stream in streams.items()} == read


def test_a_run_without_stages_reads_what_it_always_read(long_data, tiny_settings):
    plain = open_sampler(settings(tiny_settings, "data.max_seq_len=64"), long_data)
    one = open_sampler(
        settings(tiny_settings, "data.max_seq_len=64", staged(stage("all"))), long_data
    )
    assert torch.equal(plain.batch(3).input_ids, one.batch(3).input_ids)
    # The permutation of the pieces themselves, as before there were grains.
    stream = plain.samplers[0]._streams[0]
    order = np.random.default_rng((0, 0, 0)).permutation(len(stream._start))
    assert np.array_equal(stream._epoch(0)[0], order)


class Killed(BaseException):
    """Nothing of the run gets to do anything after it."""


class KillAt(TrainerEvent):
    def __init__(self, step):
        self.step = step

    def stepped(self, trainer, metrics):
        if trainer.state.step == self.step:
            raise Killed


def trainer_of(config, data, folder):
    folder.mkdir(exist_ok=True)
    return build_trainer(config, open_sampler(config, data), folder)


def run(trainer, config, until):
    output = io.StringIO()
    trainer.run(until, build_schedule(config), make_reporter(until, output))
    return output.getvalue()


def test_256_1k_4k_killed_inside_the_second_stage_resumes_bit_for_bit(
    tmp_path, long_data, tiny_settings
):
    config = settings(
        tiny_settings, STAGES, "schedule.total_steps=8", "run.checkpoint_every=3", "run.steps=6"
    )
    straight = trainer_of(config, long_data, tmp_path / "straight")
    printed = run(straight, config, 6)
    assert "stage 1 of 3, short: pieces of up to 256 tokens, 2 x 512 a step" in printed
    assert "stage 3 of 3, long" in printed
    killed = trainer_of(config, long_data, tmp_path / "parts")
    killed.events.by_name["kill"] = KillAt(4)
    with pytest.raises(Killed):
        run(killed, config, 6)
    torch.manual_seed(99)
    resumed = trainer_of(config, long_data, tmp_path / "parts")
    resumed.resume()
    assert resumed.state.step == 3  # in the middle of the second stage, steps 2 to 4
    assert resumed.state.tokens == 2 * 1024 + 1024
    run(resumed, config, 6)
    assert resumed.state.tokens == 2 * 1024 + 3 * 1024 + 4096
    want, got = straight.state.tensors(), resumed.state.tensors()
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]
    files = [load(newest(one.checkpoints)) for one in (straight, resumed)]
    assert files[0][1] == files[1][1]
    rows = [json.loads(line) for line in resumed.rows_path.read_text().splitlines()]
    assert [row["stage"] for row in rows] == [1, 1, 2, 2, 2, 3]
    rates = [row["lr"] for row in rows]
    assert rates[2] < 0.6 * rates[1]


@pytest.mark.parametrize("step", [0, 2, 5])
def test_perturbing_one_document_moves_no_other(tmp_path, long_data, tiny_settings, step):
    config = settings(tiny_settings, STAGES, "schedule.total_steps=8")
    trainer = trainer_of(config, long_data, tmp_path / "run")
    batch = trainer.sampler.batch(step)
    packed = SequenceBatch.from_lengths(batch.seqlens)
    ends = np.cumsum(batch.seqlens)
    assert len(ends) >= 2
    chosen = len(ends) // 2
    begin, end = int(ends[chosen] - batch.seqlens[chosen]), int(ends[chosen])
    changed = batch.input_ids.clone()
    changed[begin:end] = (changed[begin:end] + 7) % VOCAB
    model = trainer.state.model.eval()
    with torch.no_grad():
        before, after = (
            model.forward_packed(ids, packed, output_logits=False).hidden_TD
            for ids in (batch.input_ids, changed)
        )
    moved = (before - after).abs().amax(-1)
    own = torch.zeros(len(moved), dtype=torch.bool)
    own[begin:end] = True
    assert bool((moved[own] > 1e-3).all())
    assert float(moved[~own].max()) < 1e-5


def test_changed_data_settings_are_refused_at_resume(tmp_path, long_data, tiny_settings):
    config = settings(tiny_settings, STAGES, "schedule.total_steps=8")
    run(trainer_of(config, long_data, tmp_path / "run"), config, 1)
    other = settings(tiny_settings, STAGES.replace("= 512", "= 256"), "schedule.total_steps=8")
    with pytest.raises(CheckpointError, match=r"would begin at .*\[\[curriculum\]\]"):
        trainer_of(other, long_data, tmp_path / "run").resume()
    # What is still to come may be changed.
    later = settings(tiny_settings, STAGES.replace("= 4096", "= 2048"), "schedule.total_steps=8")
    with pytest.raises(CheckpointError, match="grain"):
        trainer_of(later, long_data, tmp_path / "run").resume()
    later = settings(tiny_settings, STAGES.replace("steps = 3", "steps = 4"))
    trainer_of(later, long_data, tmp_path / "run").resume()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((stage("a", max_seq_len=64), stage("b")), "has no length"),
        ((stage("a", steps=1, tokens=5), stage("b")), "steps and tokens"),
        ((stage("a", steps=1, max_seq_len=100), stage("b", max_seq_len=512)), "does not divide"),
        ((stage("a", steps=-1), stage("b")), "negative"),
        (("{ steps = 3 }",), "name"),
        ((stage("a", stepps=1), stage("b")), "Did you mean 'steps'"),
    ],
)
def test_a_stage_that_cannot_be_is_named(stages, message):
    with pytest.raises(ConfigError, match=message):
        Curriculum(load_train_config(overrides=[staged(*stages)]))


def test_the_resolved_file_has_the_stages(tmp_path):
    config = load_train_config(overrides=[STAGES])
    write_toml(config, tmp_path / "config.resolved.toml")
    assert load_train_config(file=tmp_path / "config.resolved.toml") == config
    assert [one.name for one in config.curriculum] == ["short", "middle", "long"]
    assert Curriculum(config).total_steps == 0
