"""Shared by the tests of k3-train: Hypothesis profiles, one thread, a model of two layers."""

import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from k3_core.config import K3Config
from k3_core.tokenizer import K3Tokenizer
from k3_train.config import TrainConfig, load_train_config
from k3_train.data.sampler import Batch
from k3_train.data.token_file import TokenFileWriter
from k3_train.loop.build import build_trainer
from k3_train.loop.progress import make_reporter
from k3_train.loop.trainer import Trainer
from k3_train.optim.cosine import CosineSchedule

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)

VOCAB = 512
TOKENS = 24


class RandomSampler:
    """Random documents as a function of the index: seven tokens, then the rest."""

    def batch(self, step: int, micro: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + micro)
        ids = torch.randint(0, VOCAB, (TOKENS + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[6] = labels[-1] = -100
        return Batch(ids[:-1], labels, (7, TOKENS - 7))


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a model with a KDA layer, an MLA layer, a LatentMoE and MTP."""
    base = K3Config.preset("k3-test")
    linear = dataclasses.replace(
        base.text.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,), head_dim=16
    )
    text = dataclasses.replace(
        base.text,
        hidden_size=32,
        num_hidden_layers=2,
        linear_attn_config=linear,
        num_experts=4,
        num_nextn_predict_layers=1,
        mtp_share_embeddings=True,
    )
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(dataclasses.replace(base, text=text).to_dict()))
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: a tokenizer of bytes and one token file."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = K3Tokenizer({bytes([byte]): byte for byte in range(256)}, 256)
    tokenizer.save_pretrained(folder)
    with TokenFileWriter(
        folder / "words", vocab_size=VOCAB, has_mask=False, sources={"kind": "test"}
    ) as writer:
        for index in range(40):
            ids = list(f"line {index} of the text, which repeats. ".encode())
            writer.add(ids, [len(ids)])
    return folder


@pytest.fixture
def tiny_settings(tiny_config: Path) -> Callable[..., TrainConfig]:
    """A function from `a.b=c` overrides to the settings of a run of the tiny model."""

    def make(*overrides: str) -> TrainConfig:
        fixed = (f"model.config='{tiny_config}'", "run.device='cpu'", "run.log_every=1")
        return load_train_config(overrides=[*fixed, *overrides])

    return make


@pytest.fixture
def make_trainer(tiny_settings: Callable[..., TrainConfig]) -> Callable[..., Trainer]:
    """A function from a folder and overrides to a trainer of the tiny model on random tokens."""

    def make(folder: Path, *overrides: str, sampler: Any = None) -> Trainer:
        folder.mkdir(parents=True, exist_ok=True)
        return build_trainer(tiny_settings(*overrides), sampler or RandomSampler(), folder)

    return make


@pytest.fixture(scope="session")
def run() -> Callable[[Trainer, int], str]:
    """A function that trains to a step, on a short schedule, and returns what was shown."""
    schedule = CosineSchedule(total_steps=8, warmup_ratio=0.25, min_lr_ratio=0.1)

    def train(trainer: Trainer, until: int) -> str:
        output = io.StringIO()
        trainer.run(until, schedule, make_reporter(until, output))
        return output.getvalue()

    return train
