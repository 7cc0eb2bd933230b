"""The implementations in plain torch through the public battery, gradients included."""

import pytest

from k3_core.testing import Check, checks_of
from k3_kernels.torch_declare import IMPLS


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=str(check), marks=[pytest.mark.gpu] * (check.device == "cuda"))
        for impl in IMPLS
        for check in checks_of(impl)
    ],
)
def test_impl(check: Check) -> None:
    check()
