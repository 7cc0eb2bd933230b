"""Every registered implementation, a third party's included, through the public battery."""

import pytest

from k3_core.testing import Check, conformance_params


@pytest.mark.parametrize("check", conformance_params())
def test_impl(check: Check) -> None:
    check()
