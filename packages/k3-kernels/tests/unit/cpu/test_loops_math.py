"""The exponential of the loops, and products with a matrix, against NumPy in more digits."""

import numpy as np
import pytest

from k3_kernels.loops import compiled
from k3_kernels.loops_math import exp, expm1, products


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


def test_exp_outside_its_range():
    x = np.array([np.nan, np.inf, 1e300, 710.0, -np.inf, -1e300, -710.0, 0.0, -0.0])
    y = np.empty_like(x)
    exp_all(x, y)
    assert np.isnan(y[0])
    assert (y[1:4] > 1e307).all() and (y[1:4] < np.inf).all()
    assert (y[4:7] > 0).all() and (y[4:7] < 1e-307).all()
    assert (y[7:] == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("outputs", "inputs"), [(0, 3), (1, 0), (3, 7), (4, 8), (9, 33)])
def test_products(outputs, inputs, dtype):
    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(outputs, inputs)).astype(dtype), draw.normal(size=inputs).astype(dtype)
    y = np.full(outputs, np.nan, dtype)
    products(w, x, y)
    expected = w.astype(np.longdouble) @ x.astype(np.longdouble)
    assert np.allclose(y, expected.astype(float), rtol=0, atol=20 * np.finfo(dtype).eps)
