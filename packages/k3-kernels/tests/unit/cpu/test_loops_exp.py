"""exp of compiled loops against NumPy's in float64."""

import numpy as np
import pytest

from k3_kernels.loops import compiled
from k3_kernels.loops_exp import exp

INF, NAN = float("inf"), float("nan")


@compiled
def exp_of_each(x_D, y_D):
    for d in range(len(x_D)):
        y_D[d] = exp(x_D[d])


def computed(x_D):
    y_D = np.empty_like(x_D)
    exp_of_each(x_D, y_D)
    return y_D


@pytest.mark.parametrize("dtype, error", [(np.float32, 2e-7), (np.float64, 1e-15)])
def test_relative_error(dtype, error):
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 200_001)]).astype(dtype)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(computed(x) / expected - 1)) < error


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("repeats", [1, 32])
def test_what_is_not_finite_or_far_away(dtype, repeats):
    """In a loop of one and in one that fills vector units."""
    given = [0.0, -0.0, INF, -INF, NAN, 1e5, -1e5, 3e38, -3e38]
    wanted = [1.0, 1.0, INF, 0.0, NAN, INF, 0.0, INF, 0.0]
    for one, value in zip(given, wanted, strict=True):
        found = computed(np.full(repeats, one, dtype))
        np.testing.assert_array_equal(found, np.full(repeats, value, dtype))
