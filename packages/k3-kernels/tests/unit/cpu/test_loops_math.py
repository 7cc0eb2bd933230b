"""The exponential of the loops, and products with a matrix, against NumPy in more digits."""

import numpy as np
import pytest

from k3_kernels.loops import compiled
from k3_kernels.loops.math import exp, expm1, products


@compiled
def exp_all(x, y):
    for i in range(len(x)):
        y[i] = exp(x[i])


@compiled
def expm1_all(x, y):
    for i in range(len(x)):
        y[i] = expm1(x[i])


@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 87.0), (np.float64, 707.0)])
def test_exp(dtype, limit):
    x = np.concatenate((np.linspace(-limit, limit, 20001), np.linspace(-1e-3, 1e-3, 2001)))
    x, y = x.astype(dtype), np.empty(len(x), dtype)
    exp_all(x, y)
    expected = np.exp(x.astype(np.longdouble))
    assert np.max(np.abs(y - expected) / expected) < 2 * np.finfo(dtype).eps
    expm1_all(x, y)
    expected = np.expm1(x.astype(np.longdouble))
    error = np.abs(y - expected) / np.where(x == 0, 1, np.abs(expected))
    assert np.max(error) < 4 * np.finfo(dtype).eps


def test_expm1_of_small_numbers():
    x = 10.0 ** np.arange(-300, -17)
    y = np.empty_like(x)
    expm1_all(x, y)
    assert np.array_equal(x, y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("repeats", [1, 32])
def test_exp_of_what_is_not_finite_or_far_away(dtype, repeats):
    """In a loop of one and in one that fills vector units."""
    given = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e5, -1e5, 3e38, -3e38]
    wanted = [1.0, 1.0, np.inf, 0.0, np.nan, np.inf, 0.0, np.inf, 0.0]
    for one, value in zip(given, wanted, strict=True):
        x, y = np.full(repeats, one, dtype), np.empty(repeats, dtype)
        exp_all(x, y)
        np.testing.assert_array_equal(y, np.full(repeats, value, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("outputs", "inputs"), [(0, 3), (1, 0), (3, 7), (4, 8), (9, 33)])
def test_products(outputs, inputs, dtype):
    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(outputs, inputs)).astype(dtype), draw.normal(size=inputs).astype(dtype)
    y = np.full(outputs, np.nan, dtype)
    products(w, x, y)
    expected = w.astype(np.longdouble) @ x.astype(np.longdouble)
    assert np.allclose(y, expected.astype(float), rtol=0, atol=20 * np.finfo(dtype).eps)
