"""fla's convolution, norms and AttnRes against torch's own functions in float64."""

import pytest
import torch
import torch.nn.functional as F

from k3_core.ops.attn_res.reference import attn_res
from k3_core.testing import relative_error
from k3_kernels.compat.fla import conv, norm_gated_layers, norm_layers
from k3_kernels.compat.fla.attnres import fused_attnres, naive_attnres
from k3_kernels.compat.fla.l2norm import L2Norm
from k3_kernels.compat.fla.norm import rms_norm
from k3_kernels.compat.fla.norm_gated import rms_norm_gated

B, T, D, W = 2, 9, 6, 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < tolerance


def conv_oracle(x, weight, bias, state, activation):
    """x [B, T, D] behind the last W - 1 columns of state [B, D, W]."""
    full = torch.cat([state, x.mT], dim=-1)
    y = F.conv1d(full[..., 1:], weight.unsqueeze(1), bias, groups=weight.shape[0]).mT
    return (y if activation is None else F.silu(y)), full[..., -weight.shape[1] :]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [T, 2])
def test_convolution_with_states_and_gradients(activation, has_bias, tokens):
    x, weight, state = randn(B, tokens, D), randn(D, W, seed=1), randn(B, D, W, seed=2)
    bias, residual = randn(D, seed=3), randn(B, tokens, D, seed=4)
    leaves = [t.requires_grad_() for t in (x, weight, state, bias, residual)]
    y, final = conv_oracle(x, weight, bias if has_bias else None, state, activation)
    expected = y + residual, final
    own = [t.detach().float().requires_grad_() for t in leaves]
    got = conv.causal_conv1d(
        own[0],
        own[1],
        own[3] if has_bias else None,
        own[4],
        initial_state=own[2],
        output_final_state=True,
        activation=activation,
    )
    check(got, expected)
    weights = [randn(*y.shape, seed=5) for y in expected]
    used = [i for i in range(5) if has_bias or i != 3]
    totals = [sum((y * w).sum() for y, w in zip(r, weights, strict=True)) for r in (expected, got)]
    wanted = torch.autograd.grad(totals[0], [leaves[i] for i in used])
    check(torch.autograd.grad(totals[1], [own[i] for i in used]), wanted)


def test_convolution_of_packed_sequences_and_of_heads():
    x, weight = randn(1, T, D).float(), randn(D, W, seed=1).float()
    cu = torch.tensor([0, 4, 4, 9])
    y, final = conv.causal_conv1d(
        x, weight, activation="silu", cu_seqlens=cu, cu_seqlens_cpu=cu, output_final_state=True
    )
    zeros = torch.zeros(1, D, W)
    pieces = [conv_oracle(x[:, a:b], weight, None, zeros, "silu") for a, b in ((0, 4), (4, 9))]
    check([y], [torch.cat([p[0] for p in pieces], dim=1)])
    check(final[[0, 2]], torch.cat([p[1] for p in pieces]))
    assert not final[1].any()
    by_head, _ = conv.fast_causal_conv1d_fn(
        x.view(1, T, 2, 3), weight, activation="silu", cu_seqlens=cu
    )
    assert torch.equal(by_head, y.view(1, T, 2, 3))


@torch.no_grad()
def test_steps_continue_a_prefill():
    layer = conv.ShortConvolution(D, W, bias=True)
    x = randn(B, T, D).float()
    whole, _ = layer(x)
    y, cache = layer(x[:, : T - 2], output_final_state=True)
    steps = [y]
    for t in (T - 2, T - 1):
        y, moved = layer(x[:, t : t + 1], cache=cache, output_final_state=True)
        assert moved is cache
        steps.append(y)
    check([torch.cat(steps, dim=1)], [whole], 1e-6)
    y, none = layer.step(x[:, :1], None, None)
    assert none is None and relative_error(y, whole[:, :1]) < 1e-6
    masked, _ = layer(x, mask=torch.ones(B, T))
    assert torch.equal(masked, whole) and layer.state_size == D * W


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("is_rms", [False, True])
def test_group_norm_with_residual_and_linear(groups, is_rms):
    x, residual, weight, bias = randn(B, D), randn(B, D, seed=1), randn(D, seed=2), randn(D, seed=3)
    linear = randn(5, D, seed=4)
    parts = (x + residual).unflatten(-1, (groups, -1))
    if not is_rms:
        parts = parts - parts.mean(-1, keepdim=True)
    expected = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected.flatten(-2) * weight + bias
    layer = norm_layers.GroupNorm(groups, D, bias=True, is_rms_norm=is_rms)
    with_linear = norm_layers.GroupNormLinear(groups, D, bias=True, is_rms_norm=is_rms)
    reference = norm_layers.GroupNormRef(groups, D, bias=True, is_rms_norm=is_rms)
    for module in (layer, with_linear, reference):
        module.weight.data, module.bias.data = weight.float(), bias.float()
    y, total = layer(x.float(), residual.float(), prenorm=True)
    check((y, total), (expected, x + residual))
    check([reference(x.float(), residual.float())], [expected])
    got = with_linear(x.float(), linear.float(), None, residual.float())
    check([got], [expected @ linear.T])


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_norms(activation):
    x, g, weight = randn(B, T, D), randn(B, T, D, seed=1), randn(D, seed=2)
    gate = torch.sigmoid(g) if activation == "sigmoid" else F.silu(g)
    leaves = [t.requires_grad_() for t in (x, g, weight)]
    for layer, normed in (
        (norm_gated_layers.FusedRMSNormGated, F.rms_norm(x, (D,), weight, 1e-5)),
        (norm_gated_layers.FusedLayerNormGated, F.layer_norm(x, (D,), weight, None, 1e-5)),
    ):
        module = layer(D, activation=activation)
        module.weight.data = weight.detach().float()
        own = [t.detach().float().requires_grad_() for t in (x, g)]
        got = module(*own)
        gate = torch.sigmoid(g) if activation == "sigmoid" else F.silu(g)
        expected = normed * gate
        check([got], [expected])
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        check(torch.autograd.grad(got.square().sum(), [*own, module.weight]), wanted)
    with pytest.raises(ValueError, match="'relu'"):
        rms_norm_gated(x, g, weight, None, "relu")


def test_norms_keep_the_sum_in_the_dtype_asked_for():
    x = randn(B, D).bfloat16()
    y, total = rms_norm(x, None, None, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert L2Norm(output_dtype=torch.float32)(x).dtype == torch.float32
    check([L2Norm(eps=0.0)(x.double())], [F.normalize(x.double(), dim=-1)], 1e-12)


def test_attnres_values_weights_and_gradients():
    sources = [randn(B, T, D, seed=i).requires_grad_() for i in range(3)]
    query, weight, output = (randn(D, seed=i).requires_grad_() for i in (5, 6, 7))
    leaves = [*sources, query, weight, output]
    mixed = attn_res(
        [s.reshape(-1, D) for s in sources], weight, 0.5 * query.unsqueeze(0), eps=1e-6
    )
    expected = F.rms_norm(mixed, (D,), output, 1e-6).view(B, T, D)
    own = [t.detach().float().requires_grad_() for t in leaves]
    for function in (fused_attnres, naive_attnres):
        got, weights = function(
            own[3], own[:3], own[4], own[5], rms_eps=1e-6, scale=0.5, return_weights=True
        )
        check([got, weights.sum(0)], [expected, torch.ones(B, T)])
        total = (expected * torch.cos(expected.detach())).sum()
        wanted = torch.autograd.grad(total, leaves, retain_graph=True)
        total = (got * torch.cos(expected.detach()).float()).sum()
        check(torch.autograd.grad(total, own), wanted, 2e-5)
    with torch.no_grad():
        check([fused_attnres(own[3], own[:3], own[4], own[5], scale=0.5)], [expected])


def test_what_does_not_fit_is_named():
    x, weight = torch.zeros(B, T, D), torch.zeros(D, W)
    for named, message in (
        ({"activation": "gelu"}, "'gelu'"),
        ({"backend": "mps"}, "'mps'"),
        ({"weight": None}, "weight is None"),
        ({"cu_seqlens": torch.tensor([0, T])}, "one row"),
    ):
        with pytest.raises(ValueError, match=message):
            conv.causal_conv1d(**{"x": x, "weight": weight, **named})
    with pytest.raises(ValueError, match="cache has shape"):
        conv.causal_conv1d_update(x[:, :1], torch.zeros(B, D, W - 1), None, weight)
    with pytest.raises(ValueError, match="checkpoint_level"):
        fused_attnres(torch.zeros(D), [x], torch.zeros(D), checkpoint_level=2)
    with pytest.raises(ValueError, match="empty"):
        fused_attnres(torch.zeros(D), [], torch.zeros(D))
