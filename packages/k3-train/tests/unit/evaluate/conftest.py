"""A model without training, and what answers in its place where an answer has to be known."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration
from k3_core.tokenizer import K3Tokenizer
from k3_train.evaluate.base import Subject


@pytest.fixture(scope="session")
def subject(tiny_config: Path, tiny_data: Path) -> Subject:
    """The tiny model, whose tokens are bytes."""
    generator = torch.Generator().manual_seed(0)
    model = K3ForConditionalGeneration(K3Config.from_file(tiny_config), generator=generator)
    return Subject(model.eval(), K3Tokenizer.from_pretrained(tiny_data), "tiny", "none", 256)


@pytest.fixture
def answering(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function that makes greedy answers those of a function from a prompt to text.

    It returns the list of the prompts that will be asked. `[EOS]` ends the text.
    """

    def install(answer: Callable[[str], str]) -> list[str]:
        asked: list[str] = []

        def generate(model, prompts, *, stop_ids, max_tokens, batch_size):
            found = []
            for ids in prompts:
                assert ids[0] == subject.tokenizer.bos_id
                asked.append(subject.tokenizer.decode(ids[1:]))
                text = subject.tokenizer.encode(answer(asked[-1]))
                whole = [*text, subject.tokenizer.eos_id][:max_tokens]
                ends = [place for place, one in enumerate(whole) if one in stop_ids]
                found.append(whole[: ends[0] + 1] if ends else whole)
            return found

        monkeypatch.setattr("k3_train.evaluate.scoring.generate_greedy", generate)
        return asked

    return install
