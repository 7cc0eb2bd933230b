"""Fixtures shared by the tests of k3-core: golden data, Hypothesis profiles, one thread."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

DATA = Path(__file__).parent / "golden" / "data"
MINI_TIKTOKEN = Path(__file__).parents[4] / "shared" / "golden" / "tokenizer_chat" / "mini.tiktoken"

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """A function from the name of a golden folder to its path."""

    def folder(name: str) -> Path:
        path = DATA / name
        assert path.is_dir(), f"no golden folder {name}; there are {sorted(os.listdir(DATA))}"
        return path

    return folder


@pytest.fixture(scope="session")
def mini_tiktoken() -> Path:
    """The part of the public vocabulary that the golden texts need; it is not shipped here."""
    path = Path(os.environ.get("K3_MINI_TIKTOKEN", MINI_TIKTOKEN))
    if not path.is_file():
        pytest.skip(f"{path} is absent (set K3_MINI_TIKTOKEN to a copy of the public vocabulary)")
    return path
