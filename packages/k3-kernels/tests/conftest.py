"""Kernels are interpreted where there is no GPU; that must be said before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)

collect_ignore_glob: list[str] = []
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob = ["unit/*/*"]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels of this session run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
