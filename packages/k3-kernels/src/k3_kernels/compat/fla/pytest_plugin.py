"""Run fla's own test files on K3: `pytest -p k3_kernels.compat.fla.pytest_plugin fla-tests`.

The files are kept outside this repository. causal_conv1d and flash_kda are served too, so that
the tests that ask for those packages are not skipped.
"""

from __future__ import annotations

import torch

from k3_kernels.compat.fla import install

install(override=True, peers=True)


def pytest_runtest_teardown() -> None:
    """Give memory back, because several processes share the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
