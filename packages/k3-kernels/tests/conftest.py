"""Kernels are interpreted where there is no GPU; that must be said before triton is imported."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when a function is compiled, those of triton.language included. Nothing else in this
    # repository uses triton, so that the other tests of the process do not see the difference.
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        raise pytest.UsageError("triton was imported already; set TRITON_INTERPRET=1 and run again")
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)

collect_ignore_glob = [] if find_spec("triton") else ["unit/ops/*", "unit/kda/*"]
if not find_spec("numba"):
    collect_ignore_glob += ["unit/cpu/test_loops_*"]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels of this session run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
