"""moe_experts as loops: routes in any order, rows alone, bad routes, what it leaves to torch.

T tokens, D width, WIDTH expert width, E experts, k routes a token.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from k3_core.ops.moe_experts.reference import moe_experts as reference
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.quant import MXTensor
from k3_core.testing import relative_error
from k3_kernels.moe_experts import loops

E, D, WIDTH = 7, 33, 18
SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)


def make(tokens, routes=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    idx = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :routes]
    stacks = rand(E, WIDTH, D) / 4, rand(E, WIDTH, D) / 4, rand(E, D, WIDTH) / 4
    return rand(tokens, D), idx, rand(tokens, routes).sigmoid(), *stacks


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "cpu", None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("tokens", [1, 8])
def test_against_the_reference(tokens, linear_beta, dtype, tolerance, only_loops):
    call = make(tokens, dtype=dtype)
    assert not call[1].is_contiguous() or tokens == 1
    activation = partial(situ_glu, beta=4.0, linear_beta=linear_beta)
    got = loops.moe_experts(*call, activation=activation)
    exact = [x.double() if x.is_floating_point() else x for x in call]
    assert relative_error(got, reference(*exact, activation=activation)) < tolerance


def test_an_expert_twice_and_strided_rows(only_loops):
    x, idx, weight, *stacks = make(4)
    idx[:, 1], wide = idx[:, 0], torch.cat((x, x), dim=-1)
    got = loops.moe_experts(wide[:, :D], idx, weight, *stacks, activation=SITU)
    expected = reference(x, idx, weight, *stacks, activation=SITU)
    assert relative_error(got, expected) < 1e-6


def test_a_row_alone_is_the_same(only_loops):
    x, idx, weight, *stacks = make(8)
    got = loops.moe_experts(x, idx, weight, *stacks, activation=SITU)
    rows = [
        loops.moe_experts(*(a[t : t + 1] for a in (x, idx, weight)), *stacks, activation=SITU)
        for t in range(8)
    ]
    assert torch.equal(got, torch.cat(rows))


def test_nan_stays_in_its_row(only_loops):
    x, idx, weight, *stacks = make(5)
    clean = loops.moe_experts(x, idx, weight, *stacks, activation=SITU)
    x[2, 4] = float("nan")
    got = loops.moe_experts(x, idx, weight, *stacks, activation=SITU)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def make_packed(tokens, dtype=torch.float32):
    """Random bytes; scales from 2^-127 on, most of them near 1."""
    generator = torch.Generator().manual_seed(0)

    def packed(*shape):
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator)
        scale = torch.randint(120, 128, (*shape[:-1], shape[-1] // 32), generator=generator)
        scale[0, 0] = 0
        return MXTensor(codes.to(torch.uint8), scale.to(torch.uint8))

    x, idx, weight, *_ = make(tokens, dtype=dtype)
    stacks = packed(E, 96, 64), packed(E, 96, 64), packed(E, 40, 96)
    return torch.cat((x, x), dim=-1)[:, :64], idx, weight, *stacks


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("tokens", [1, 8])
def test_packed_experts(tokens, dtype, tolerance, only_loops):
    x, idx, weight, *stacks = make_packed(tokens, dtype)
    got = loops.moe_experts(x, idx, weight, *stacks, activation=SITU)
    exact = [stack.dequantize(torch.float64) for stack in stacks]
    expected = reference(x.double(), idx, weight.double(), *exact, activation=SITU)
    assert got.shape == (tokens, 40)
    assert relative_error(got, expected) < tolerance
    decoded = [stack.dequantize(dtype) for stack in stacks]
    assert torch.equal(got, loops.moe_experts(x, idx, weight, *decoded, activation=SITU))


EVERY_CODE = """
import torch
from k3_core.quant import MXTensor
from k3_kernels.loops import DTYPES
from k3_kernels.moe_experts.decode import decode

codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat_interleave(256, dim=0)
scale = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).repeat(1, 16, 1)
for dtype, kind in DTYPES.items():
    values = torch.empty(256, 16, 32, dtype=dtype)
    decode(codes.data_ptr(), scale.data_ptr(), scale.numel(), values.data_ptr(), kind)
    expected = MXTensor(codes, scale).dequantize(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
"""


@pytest.mark.parametrize("processor", ["this", "any"])
def test_every_code_with_every_scale(processor, tmp_path):
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    own = {"NUMBA_CACHE_DIR": str(tmp_path), **(plain if processor == "any" else {})}
    run = [sys.executable, "-c", EVERY_CODE]
    subprocess.run(run, env={**os.environ, **own}, check=True, timeout=300)


def test_a_scale_that_is_nan_reaches_only_its_expert(only_loops):
    x, idx, weight, *stacks = make_packed(8)
    stacks[1].scale[3, 5, 1] = 255
    got = loops.moe_experts(x, idx, weight, *stacks, activation=SITU)
    assert torch.equal(got.isnan().all(-1), (idx == 3).any(-1))
    assert torch.equal(got.isnan().any(-1), (idx == 3).any(-1))


@pytest.mark.parametrize("bad", [-1, E, 2**40])
def test_an_expert_that_does_not_exist_is_an_error(bad):
    x, idx, weight, *stacks = make(2)
    idx[1, 1] = bad
    with pytest.raises(ValueError, match=rf"allowed are 0\.\.{E - 1}"):
        loops.moe_experts(x, idx, weight, *stacks, activation=SITU)


def test_routes_that_do_not_fit_are_an_error():
    x, idx, weight, *stacks = make(3)
    with pytest.raises(ValueError, match=r"must be \[T, k\]"):
        loops.moe_experts(x, idx[:2], weight[:2], *stacks, activation=SITU)
    with pytest.raises(ValueError, match=r"must be \[T, k\]"):
        loops.moe_experts(x, idx, weight[:, :2], *stacks, activation=SITU)


def test_what_is_left_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(loops.cpu, "moe_experts", lambda *args, **named: calls.append(args))
    x, idx, weight, *stacks = make(2)

    def is_left(idx=idx, stacks=stacks, activation=SITU):
        calls.clear()
        loops.moe_experts(x, idx, weight, *stacks, activation=activation)
        return bool(calls)

    assert not is_left()
    assert is_left(activation=lambda gate, up: F.silu(gate) * up)
    assert is_left(idx=idx.int())
    assert is_left(stacks=[w.mT.contiguous().mT for w in stacks])
    assert is_left(stacks=[w.double() for w in stacks])
    assert is_left(stacks=[*stacks[:2], make_packed(2)[-1]])
    assert is_left(stacks=[w.requires_grad_() for w in stacks])
    monkeypatch.setattr(loops, "MAX_PRODUCTS", idx.numel() * D * WIDTH)
    with torch.no_grad():
        assert not is_left()
        monkeypatch.setattr(loops, "MAX_PRODUCTS", idx.numel() * D * WIDTH - 1)
        assert is_left()
