"""Training on text, images and clips in one loss: resume, packing, norms by tower, digits."""

import dataclasses
import json
import time

import pytest
import torch

from k3_core.cli.app import run as k3
from k3_core.config import ConfigError, K3Config
from k3_core.model import K3ForConditionalGeneration
from k3_core.tokenizer import K3Tokenizer
from k3_train.config import load_train_config
from k3_train.data.corpus import build_corpus
from k3_train.data.sampler import Batch, BatchImages, PackedSampler
from k3_train.data.sources.pictures import DigitsSource
from k3_train.data.token_file import TokenFile
from k3_train.loop.build import build_trainer
from k3_train.loop.corpus import check_pictures, open_sampler
from k3_train.loop.log import NonFiniteLossError
from k3_train.packed import packed
from k3_train.study.measure import answer_accuracy

PRESET = "k3-test-vision"
TOWERS = ("grad_norm_text", "grad_norm_vision", "grad_norm_projector")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder of digits and of text, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = K3Tokenizer({bytes([byte]): byte for byte in range(256)}, 256)
    tokenizer.save_pretrained(folder)
    build_corpus(folder / "digits", tokenizer, DigitsSource(), kind="digits", num_tokens=1500)
    return folder


@pytest.fixture
def make(data):
    """A function from a folder and overrides to a trainer on digits."""

    def trainer(folder, *overrides):
        fixed = ("run.log_every=1", "data.tokens_per_batch=160", "run.accumulation=2")
        config = load_train_config(preset=PRESET, overrides=[*fixed, *overrides])
        folder.mkdir(exist_ok=True)
        return build_trainer(config, open_sampler(config, data), folder)

    return trainer


def different(left, right):
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def test_two_and_two_steps_equal_four_in_every_tensor(tmp_path, make, run):
    straight = make(tmp_path / "straight")
    run(straight, 4)
    run(make(tmp_path / "parts"), 2)
    resumed = make(tmp_path / "parts", "run.seed=0")
    resumed.resume()
    run(resumed, 4)
    assert not different(straight.state.tensors(), resumed.state.tensors())
    paths = (tmp_path / name / "run.jsonl" for name in ("straight", "parts"))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    for row in rows[0] + rows[1]:
        del row["tokens_per_s"]
    assert rows[0] == rows[1]


def test_norms_of_the_towers_add_up_to_that_of_the_gradient(tmp_path, make, run):
    run(make(tmp_path), 3)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        norms = [row[name] for name in TOWERS]
        assert min(norms) > 0
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(row["grad_norm"], rel=1e-4)


def test_the_guard_names_the_op_of_a_tower(tmp_path, make, run):
    trainer = make(tmp_path)
    with torch.no_grad():
        trainer.state.model.vision_tower.encoder.blocks[1].mlp.fc0.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteLossError, match=r"vision_tower\.encoder\.blocks\.1\.mlp"):
        run(trainer, 1)


def test_pictures_that_the_model_cannot_read_are_refused_before_a_step(data):
    config = load_train_config(preset=PRESET)
    sampler, vision = open_sampler(config, data), K3Config.preset(PRESET).vision
    check_pictures(sampler, vision)
    with pytest.raises(ConfigError, match="the model has no vision tower"):
        check_pictures(sampler, None)
    with pytest.raises(ConfigError, match=r"sides of \[14\] pixels, the model's of 16"):
        check_pictures(sampler, dataclasses.replace(vision, patch_size=16))


def separate(batch: Batch) -> list[Batch]:
    """Each sequence of a batch as a batch of its own."""
    parts, at, patch, images = [], 0, 0, batch.images
    for length in batch.seqlens:
        own = [i for i, (start, _) in enumerate(images.spans) if at <= start < at + length]
        count = int(images.grids[own].prod(1).sum())
        pictures = None
        if own:
            spans = tuple((images.spans[i][0] - at, images.spans[i][1] - at) for i in own)
            patches = images.patches[patch : patch + count]
            pictures = BatchImages(patches, images.grids[own], spans)
        here = slice(at, at + length)
        parts.append(Batch(batch.input_ids[here], batch.labels[here], (length,), pictures))
        at, patch = at + length, patch + count
    return parts


def with_text(batch: Batch) -> Batch:
    """The batch with a sequence of text behind it."""
    text = torch.arange(40, 60)
    return Batch(
        torch.cat((batch.input_ids, text)),
        torch.cat((batch.labels, text + 1)),
        (*batch.seqlens, len(text)),
        batch.images,
    )


def test_a_batch_with_pictures_equals_its_documents_alone(tmp_path, make):
    """Loss, MTP loss and every gradient: each document is a micro-batch of its own."""
    base = K3Config.preset(PRESET)
    text = dataclasses.replace(base.text, num_nextn_predict_layers=1, mtp_share_embeddings=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dataclasses.replace(base, text=text).to_dict()))
    found = []
    for name in ("together", "apart"):
        trainer = make(tmp_path / name, f"model.config='{config}'")
        batch = with_text(trainer.sampler.batch(0))
        assert len(batch.seqlens) > 3 and batch.images is not None
        batches = [batch] if name == "together" else separate(batch)
        trainer.stepper.accumulate(batches, until=len(batches))
        grads = {
            name: p.grad
            for name, p in trainer.state.model.named_parameters()
            if p.grad is not None and "e_score" not in name
        }
        found.append(trainer.state.metrics | grads)
    assert found[0].keys() == found[1].keys()
    assert {"loss", "mtp_loss", "vision_tower.patch_embed.proj.weight"} <= found[0].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=2e-4, atol=2e-6, msg=name)


@torch.no_grad()
def test_another_picture_moves_no_other_document(data):
    generator = torch.Generator().manual_seed(0)
    model = K3ForConditionalGeneration(K3Config.preset(PRESET), generator=generator).eval()
    batch = PackedSampler([TokenFile.open(data / "digits")], [1], 200, 128, seed=0).batch(0)
    patches = batch.images.patches.clone()
    patches[: int(batch.images.grids[0].prod())] = 0
    changed = dataclasses.replace(batch, images=dataclasses.replace(batch.images, patches=patches))
    logits = [
        model.forward_packed(one.input_ids, packed(one, model.device)).logits.split(one.seqlens)
        for one in (batch, changed)
    ]
    assert not torch.equal(logits[0][0], logits[1][0])
    for left, right in zip(logits[0][1:], logits[1][1:], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_answers_are_counted_by_what_they_follow(data):
    """A model that gives the labels is right everywhere; one wrong token makes an answer wrong."""
    batch = PackedSampler([TokenFile.open(data / "digits")], [1], 400, 128, seed=0).batch(0)

    class Knows:
        device = torch.device("cpu")
        wrong = None

        def eval(self):
            return self

        def forward_packed(self, ids, sequences):
            logits = torch.nn.functional.one_hot(batch.labels.clamp(min=0), 512).float()
            if self.wrong is not None:
                logits[self.wrong] = 0
                logits[self.wrong, 300] = 1
            return type("Out", (), {"logits": logits})

    model = Knows()
    assert answer_accuracy(model, batch) == {"image": 1.0, "clip": 1.0}
    kinds = batch.images.grids[:, 0].tolist()
    first = batch.images.spans[kinds.index(4)][1] - 1
    model.wrong = first + 1
    counted = [start for start, grid in zip(batch.images.spans, kinds, strict=True) if grid == 4]
    found = answer_accuracy(model, batch)
    assert found["image"] == 1.0
    assert found["clip"] == pytest.approx(1 - 1 / len(counted))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_digits_and_clips_are_learnt_from_random_weights_in_minutes(tmp_path):
    """From random initial weights to .9 of held-out images and clips within five minutes."""
    (tmp_path / "data").mkdir()
    tokenizer = K3Tokenizer({bytes([byte]): byte for byte in range(256)}, 256)
    tokenizer.save_pretrained(tmp_path / "data")
    for name, source, tokens in (
        ("data/digits", DigitsSource(), 400_000),
        ("heldout", DigitsSource(heldout=True), 20_000),
    ):
        build_corpus(tmp_path / name, tokenizer, source, kind="digits", num_tokens=tokens)
    started, began = time.process_time(), time.perf_counter()
    options = [f"--data={tmp_path / 'data'}", "--device=cpu"]
    out = tmp_path / "run"
    assert k3(["train", "fit", f"--preset={PRESET}", f"--out={out}", *options]) == 0
    seconds, wall = time.process_time() - started, time.perf_counter() - began
    model = K3ForConditionalGeneration.from_pretrained(out / "model")
    file = TokenFile.open(tmp_path / "heldout")
    batch = PackedSampler([file], [1], file.num_tokens, 512, seed=0).batch(0)
    accuracy = answer_accuracy(model, batch)
    print(f"{accuracy} after {seconds:.0f} s of CPU time, {wall:.0f} s by the clock")
    assert min(accuracy.values()) >= 0.9 and set(accuracy) == {"image", "clip"}
    assert seconds < 300
    rows = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    assert all(row[name] > 0 for row in rows for name in TOWERS)
