"""The plugin's implementations through the public battery of k3-core."""

import pytest

from k3_core.testing import check_impl


@pytest.mark.parametrize(
    ("kind", "implements", "name"),
    [("attention", "kda", "kda.recurrent"), ("kernel", "situ_glu", "situ_glu.logistic")],
)
def test_implementation_conforms(kind: str, implements: str, name: str) -> None:
    assert check_impl(kind, implements, name) > 0
