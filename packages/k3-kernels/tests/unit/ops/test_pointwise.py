"""rms_norm, gated_rms_norm, situ_glu, attn_res and its two phases. T tokens, D width."""

import pytest
import torch

from k3_core.ops.attn_res.reference import attn_res as mix_reference
from k3_core.ops.depth_read.reference import depth_read as read_reference
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm as norm_reference
from k3_core.ops.rms_norm.reference import rms_norm as plain_reference
from k3_core.ops.situ_glu.reference import situ_glu as glu_reference
from k3_core.testing import relative_error
from k3_kernels.attn_res.op import attn_res
from k3_kernels.attn_res.phases import attn_res_blocks, attn_res_merge
from k3_kernels.depth_read.op import depth_read
from k3_kernels.gated_rms_norm.op import gated_rms_norm
from k3_kernels.rms_norm.op import rms_norm
from k3_kernels.situ_glu.op import situ_glu


def _randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("num_sources, has_added", [(0, True), (3, True), (4, False)])
def test_depth_read_sums_mixes_and_norms(num_sources, has_added, dtype, limit, device):
    rows = [_randn(7, 40, device=device, seed=i).to(dtype) * (i + 1) for i in range(6)]
    sources, prefix, added = rows[:num_sources], rows[-1], rows[-2] if has_added else None
    weights = [_randn(40, device=device, seed=9).to(dtype) + 1 for _ in range(3)]
    named = {"eps": 1e-6, "out_eps": 1e-5}
    x, total = depth_read(sources, prefix, added, weights[0], weights[1][None], weights[2], **named)
    exact = [s.double() for s in sources], total.double(), None
    norm, proj, out_norm = (w.double() for w in weights)
    expected, _ = read_reference(*exact, norm, proj[None], out_norm, **named)
    assert relative_error(x, expected) < limit
    if added is None:
        assert total is prefix
    else:
        assert torch.equal(total, prefix + added) and torch.equal(prefix, rows[-1])


def test_depth_read_names_what_does_not_fit(device):
    x, w = _randn(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match="added is"):
        depth_read([x], x, x[:2], w, w[None], w, eps=1e-6, out_eps=1e-6)
    with pytest.raises(ValueError, match="out_norm is"):
        depth_read([x], x, x, w, w[None], w[:4], eps=1e-6, out_eps=1e-6)


@pytest.mark.parametrize("width", [1, 33, 512])
def test_plain_norm_of_strided_rows(width, device):
    x, weight = _randn(5, 600, device=device)[:, 7 : 7 + width], _randn(width, device=device)
    expected = plain_reference(x.double(), weight.double(), eps=1e-5)
    assert relative_error(rms_norm(x, weight, eps=1e-5), expected) < 1e-6
    stacked = rms_norm(x.view(5, 1, width), weight, eps=1e-5)
    assert torch.equal(stacked[:, 0], rms_norm(x, weight, eps=1e-5))
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(x, torch.ones(width + 1, device=device), eps=1e-5)


def test_plain_norm_rounds_before_the_weight(device):
    x = (_randn(64, 96, device=device) * 3).half()
    weight = _randn(96, device=device).half()
    y = rms_norm(x, weight, eps=1e-5)
    steps = (y.float() - plain_reference(x, weight, eps=1e-5).float()).abs() / y.float().abs()
    assert (steps > 0).float().mean() < 0.01 and steps.max() < 2**-9


def test_norm_of_strided_heads(device):
    wide = _randn(6, 3, 40, device=device)
    x, gate, weight = wide[..., :16], wide[..., 20:36], _randn(16, device=device)
    expected = norm_reference(x.double(), weight.double(), gate.double(), eps=1e-5)
    assert relative_error(gated_rms_norm(x, weight, gate, eps=1e-5), expected) < 1e-6


def test_norm_offsets_beyond_32_bits(device):
    stride = 2**31
    x = torch.empty(stride + 32, dtype=torch.float16, device=device)
    x = x.as_strided((2, 2, 16), (stride, 16, 1))
    x.copy_(_randn(2, 2, 16, device=device))
    gate = _randn(2, 2, 16, device=device)
    y = gated_rms_norm(x, torch.ones(16, device=device), gate, eps=1e-5)
    expected = norm_reference(x.double(), torch.ones(16).to(device), gate.double(), eps=1e-5)
    assert relative_error(y, expected) < 1e-6


def test_glu_of_the_halves_of_one_matrix(device):
    gate, up = _randn(7, 50, device=device).chunk(2, dim=1)
    got = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    expected = glu_reference(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("size", [1e-6, 1e-2, 0.7, 0.9, 30.0])
def test_glu_is_accurate_at_every_size(size, device):
    # Element by element: a tanh that cancels near zero is off only where the result is small.
    gate, up = size * _randn(64, device=device), size * _randn(64, device=device, seed=1)
    got = situ_glu(gate, up, beta=4.0, linear_beta=25.0).double()
    expected = glu_reference(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    assert ((got - expected).abs() <= 3e-6 * expected.abs()).all()


def test_glu_keeps_nan_and_saturates_infinity(device):
    gate = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).to(device)
    got = situ_glu(gate, torch.full_like(gate, float("inf")), beta=4.0, linear_beta=25.0)
    assert got[0].isnan() and got[1:].tolist() == [100.0, 0.0, 0.0]


@pytest.mark.parametrize("num_sources", [2, 16, 17])
def test_mix_of_many_sources(num_sources, device):
    values = [_randn(3, 24, device=device, seed=i) * (1 + i) for i in range(num_sources)]
    norm, proj = _randn(24, device=device), _randn(1, 24, device=device)
    exact = [v.double() for v in values]
    expected = mix_reference(exact, norm.double(), proj.double(), eps=1e-5)
    assert relative_error(attn_res(values, norm, proj, eps=1e-5), expected) < 1e-6


def test_mix_reads_sources_at_any_address(device):
    flat = _randn(1 + 5 * 16, device=device)
    values = [flat[1:].view(5, 16), _randn(16, 5, device=device).T]
    weights = _randn(16, device=device), _randn(1, 16, device=device)
    expected = mix_reference([v.double() for v in values], *weights, eps=1e-5)
    assert relative_error(attn_res(values, *weights, eps=1e-5), expected) < 1e-6


def test_mix_with_a_nan_row_leaves_the_other_rows(device):
    values = [_randn(4, 16, device=device, seed=i) for i in range(3)]
    values[1][2] = float("nan")
    got = attn_res(values, torch.ones(16).to(device), _randn(1, 16, device=device), eps=1e-5)
    assert got[2].isnan().all() and got[[0, 1, 3]].isfinite().all()


def test_mix_refuses_sources_of_different_shapes(device):
    values = [_randn(4, 16, device=device), _randn(3, 16, device=device)]
    with pytest.raises(ValueError, match=r"\(3, 16\), \(4, 16\)"):
        attn_res(values, torch.ones(16).to(device), torch.ones(1, 16).to(device), eps=1e-5)


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_two_phases_equal_the_mix(num_blocks, device):
    width, sites = 40, 3
    values = [_randn(5, width, device=device, seed=i) * (1 + i) for i in range(num_blocks)]
    norms, projs = _randn(sites, width, device=device), _randn(sites, width, device=device, seed=9)
    phase = attn_res_blocks(values, norms * projs, eps=1e-5) if num_blocks else None
    prefix = _randn(5, width, device=device, seed=20)
    out_norm = _randn(width, device=device, seed=21)
    for site in range(sites):
        delta = _randn(5, width, device=device, seed=30 + site) if site else None
        running = prefix.clone() if delta is None else prefix + delta
        y, mix = attn_res_merge(
            prefix,
            delta,
            None if phase is None else (phase[0][site], phase[1][site]),
            norms[site],
            projs[site : site + 1],
            out_norm,
            eps=1e-5,
            out_eps=1e-6,
            return_mix=True,
        )
        assert torch.equal(prefix, running), "the running sum is updated in place, exactly"
        exact = [v.double() for v in (*values, running)]
        expected = mix_reference(
            exact, norms[site].double(), projs[site : site + 1].double(), eps=1e-5
        )
        assert relative_error(mix, expected) < 1e-6
        scale = torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-6)
        assert relative_error(y, expected * scale * out_norm.double()) < 1e-6
