"""moe_experts: plans, tiles, packed weights at their limits, ids that name no expert.

T tokens, D width, I expert width, E experts, k routes a token.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from k3_core.config import K3Config
from k3_core.moe.base import glu
from k3_core.ops.moe_experts.reference import moe_experts as reference
from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.quant import MXTensor
from k3_core.testing import relative_error
from k3_kernels.moe_experts import op, plan
from k3_kernels.moe_experts.activation import situ_betas
from k3_kernels.moe_experts.op import TILES, moe_experts
from k3_kernels.situ_glu.op import situ_glu as triton_situ_glu

SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)


class _Draw:
    def __init__(self, device: str) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.device)

    def routes(self, tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.rand(tokens, experts, generator=self.generator)
        weights = torch.rand(tokens, top_k, generator=self.generator)
        return draws.argsort(1)[:, :top_k].to(self.device), weights.to(self.device)

    def stacks(self, experts: int, width: int, inner: int, is_packed: bool) -> list:
        shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
        stacks = [self.normal(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
        return [mx_quantize(w) for w in stacks] if is_packed else stacks


def _double(stack):
    return stack.dequantize(torch.float64) if isinstance(stack, MXTensor) else stack.double()


def _expected(x, idx, weight, stacks, activation=SITU):
    args = (x.double(), idx, weight.double(), *map(_double, stacks))
    return reference(*args, activation=activation)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("tile", [tiles for _, *tiles in TILES])
def test_every_tile(tile, is_packed, device, monkeypatch):
    # Widths that no tile divides: the last step of K is masked, scales included.
    monkeypatch.setattr(op, "TILES", ((float("inf"), *tile),))
    draw = _Draw(device)
    x, stacks = draw.normal(9, 96), draw.stacks(3, 96, 160, is_packed)
    idx, weight = draw.routes(9, 3, 2)
    got = moe_experts(x, idx, weight, *stacks, activation=SITU)
    assert relative_error(got, _expected(x, idx, weight, stacks)) < 2e-6


def test_scales_behind_the_last_are_not_read(device):
    # Unmasked, the byte behind a row is another row's, and behind the stack 0xff = NaN
    # (triton issue 10772, vllm issue 47303).
    draw = _Draw(device)
    x, stacks = draw.normal(4, 96), draw.stacks(2, 96, 32, True)
    poisoned = []
    for w in stacks:
        scale = torch.full((w.scale.numel() + 64,), 255, dtype=torch.uint8, device=device)
        scale[: w.scale.numel()] = w.scale.flatten()
        poisoned.append(MXTensor(w.packed, scale[: w.scale.numel()].view(w.scale.shape)))
    idx, weight = draw.routes(4, 2, 2)
    got = moe_experts(x, idx, weight, *poisoned, activation=SITU)
    assert relative_error(got, _expected(x, idx, weight, stacks)) < 2e-6


@pytest.mark.parametrize("byte", [0, 1, 127, 129, 200, 240])
def test_scale_bytes(byte, device):
    # Byte 0 is 2^-127, not zero (triton pulls 11624, 11737).
    codes = torch.arange(32, dtype=torch.uint8).view(1, 2, 16) * 7 % 251
    w1 = MXTensor(codes.to(device), torch.full((1, 2, 1), byte, dtype=torch.uint8, device=device))
    w3 = torch.eye(2, 32).to(device)[None]
    w2 = torch.eye(32, 2).to(device)[None]
    x = torch.full((1, 32), 2.0 ** min(100, 127 - byte + 20), device=device)
    idx, weight = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1).to(device)

    def take_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate

    got = moe_experts(x, idx, weight, w1, w3, w2, activation=take_gate)
    expected = _expected(x, idx, weight, (w1, w3, w2), take_gate)
    assert expected.abs().max() > 0
    assert relative_error(got, expected) < 2e-6


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("activation", [lambda g, u: F.silu(g) * u, lambda g, u: SITU(g, u)])
def test_activations_that_are_not_fused(activation, is_packed, device):
    assert situ_betas(activation) is None
    draw = _Draw(device)
    x, stacks = draw.normal(5, 64), draw.stacks(4, 64, 32, is_packed)
    idx, weight = draw.routes(5, 4, 2)
    got = moe_experts(x, idx, weight, *stacks, activation=activation)
    assert relative_error(got, _expected(x, idx, weight, stacks, activation)) < 2e-6


@pytest.mark.parametrize("function", [situ_glu, triton_situ_glu])
def test_the_activation_of_a_model_is_fused(function):
    config = K3Config.preset("k3-test").text
    activation = glu(config, SimpleNamespace(situ_glu=function))
    assert situ_betas(activation) == (config.situ_beta, config.situ_linear_beta)


def test_only_situ_with_its_two_settings_is_fused():
    # An activation taken for another one goes unnoticed (flashinfer pull 4597).
    assert situ_betas(SITU) == (4.0, 25.0)
    assert situ_betas(partial(situ_glu, beta=4.0, linear_beta=None)) == (4.0, None)
    assert situ_betas(partial(situ_glu, beta=4.0)) is None
    assert situ_betas(partial(F.glu, dim=1)) is None
    assert situ_betas(partial(lambda g, u, beta, linear_beta: g, beta=1, linear_beta=2)) is None


@pytest.mark.parametrize("mixed", [(0,), (2,), (0, 1)])
def test_plain_and_packed_stacks_together(mixed, device):
    draw = _Draw(device)
    x, stacks = draw.normal(5, 64), draw.stacks(4, 64, 32, True)
    stacks = [_double(w).float() if i in mixed else w for i, w in enumerate(stacks)]
    idx, weight = draw.routes(5, 4, 2)
    got = moe_experts(x, idx, weight, *stacks, activation=SITU)
    assert relative_error(got, _expected(x, idx, weight, stacks)) < 2e-6


def test_ids_outside_the_range_add_nothing(device, monkeypatch):
    # -1 wrapped to the last expert, and its unwritten slots were summed (vllm pull 46408).
    monkeypatch.setattr(op, "check_routes", lambda *args: None)  # refuses them where it can look
    draw = _Draw(device)
    x, stacks = draw.normal(5, 32), draw.stacks(4, 32, 32, False)
    idx, weight = draw.routes(5, 4, 2)
    idx[0, 1], idx[3, 0], idx[4] = -1, 4, -1
    got = moe_experts(x, idx, weight, *stacks, activation=SITU)
    is_known = (idx >= 0) & (idx < 4)
    expected = _expected(x, idx.clamp(0, 3), weight * is_known, stacks)
    assert relative_error(got, expected) < 2e-6
    assert not got[4].any()


def test_a_token_with_nan_leaves_the_others(device):
    draw = _Draw(device)
    x, stacks = draw.normal(6, 32), draw.stacks(2, 32, 32, False)
    x[2] = float("nan")
    idx, weight = draw.routes(6, 2, 1)
    got = moe_experts(x, idx, weight, *stacks, activation=SITU)
    assert got[2].isnan().all() and got[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("limit", [0, plan.SCAN_LIMIT])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_plan_by_enumeration(limit, tokens, device, monkeypatch):
    # Both ways to sort: 10 experts of which some get no row (torch issue 152668), some ids wrong.
    monkeypatch.setattr(plan, "SCAN_LIMIT", limit)
    generator = torch.Generator().manual_seed(tokens)
    idx = torch.randint(-1, 12, (tokens, 3), generator=generator).to(device)
    idx[idx == 5] = 6
    made = plan.make_plan(idx, 10, 4)
    flat = idx.flatten().tolist()
    rows = [[r for r, e in enumerate(flat) if e == expert] for expert in range(10)]
    total = sum(map(len, rows))
    assert made.order[:total].tolist() == [r for own in rows for r in own]
    starts = [sum(map(len, rows[:expert])) for expert in range(11)]
    assert made.starts.tolist() == starts
    tiles = [(e, starts[e] + i) for e in range(10) for i in range(0, len(rows[e]), 4)]
    assert made.tile_expert.tolist()[: len(tiles)] == [e for e, _ in tiles]
    assert made.tile_row.tolist()[: len(tiles)] == [row for _, row in tiles]
    assert set(made.tile_expert.tolist()[len(tiles) :]) <= {-1}


def test_wrong_routes_are_refused_where_they_can_be_seen():
    draw = _Draw("cpu")
    x, stacks = draw.normal(2, 32), draw.stacks(4, 32, 32, False)
    idx, weight = draw.routes(2, 4, 2)
    with pytest.raises(ValueError, match=r"allowed are 0\.\.3"):
        moe_experts(x, idx - 4, weight, *stacks, activation=SITU)


def test_shapes_that_do_not_fit(device):
    draw = _Draw(device)
    w1, w3, w2 = draw.stacks(4, 64, 32, False)
    x, routes = draw.normal(3, 64), draw.routes(3, 4, 2)
    for wrong in ((w1, w3[:, :16], w2), (w1, w3, w2[:3]), (w2, w2, w1)):
        with pytest.raises(ValueError, match=r"w1 and w3 are \[E, I, D\]"):
            moe_experts(x, *routes, *wrong, activation=SITU)
