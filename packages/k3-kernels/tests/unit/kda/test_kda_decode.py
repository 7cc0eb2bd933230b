"""The fused decode against short_conv, kda_step and gated_rms_norm in float64 (report 1.8)."""

import pytest
import torch

from k3_core.ops.gated_rms_norm.reference import gated_rms_norm
from k3_core.ops.kda_step.reference import kda_step
from k3_core.ops.short_conv.reference import short_conv
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_decode.op import kda_decode
from k3_kernels.kda_step.config import StepBlocks, choose_decode_blocks

S, H, EPS = 5, 2, 1e-5


def draw(rows, tokens, num_k, num_v, taps, device, dtype=torch.float32):
    v, lead, channels = Values(dtype, device), (rows, tokens), H * (2 * num_k + num_v)
    args = [v.act(*lead, channels), v.full(channels, 1, taps, scale=0.5)]
    args += [v.act(*lead, H, num_k), v.act(*lead, H), v.full(H), v.full(H, num_k)]
    args += [v.act(*lead, H, num_v), v.full(num_v, shift=1.0)]
    return args, v.full(S, H, num_v, num_k), v.act(S, channels, taps - 1)


def expected(args, state, window, slots, commits, num_k):
    """y, states and windows by the three ops, row by row."""
    x, weight, gate, beta, A_log, dt_bias, out_gate, norm = (t.double() for t in args)
    state, window = state.double(), window.double()
    y = torch.zeros_like(out_gate)
    num_tokens = x.shape[1]
    for row, slot in enumerate(slots):
        if slot < 0:
            continue

        old = window[slot : slot + 1].clone()

        def convolve(count, row=row, old=old):
            offsets = torch.tensor([0, count], device=x.device)
            return short_conv(
                x[row, :count],
                weight,
                cu_seqlens_N1=offsets,
                initial_state_NCW=old,
                output_final_state=True,
            )

        count = num_tokens if commits is None else commits[row]
        qkv = convolve(num_tokens)[0]
        if count:
            window[slot] = convolve(count)[1][0]
        sizes = [H * num_k, H * num_k, qkv.shape[1] - 2 * H * num_k]
        q, k, v = (t.unflatten(-1, (H, -1))[None] for t in qkv.split(sizes, dim=-1))
        o = kda_step(
            q,
            k,
            v,
            gate[row : row + 1],
            beta[row : row + 1],
            A_log,
            dt_bias,
            state_SHVK=state,
            slots_B=torch.tensor([slot], device=x.device),
            lower_bound=-5.0,
            num_commit_B=torch.tensor([count], device=x.device),
        )
        y[row] = gated_rms_norm(o[0], norm, out_gate[row], eps=EPS)
    return y, state, window


@pytest.mark.parametrize("num_k, num_v, taps", [(16, 16, 4), (24, 12, 4), (16, 32, 2)])
@pytest.mark.parametrize(
    "tokens, slots, commits",
    [
        (1, [3, -1, 0], None),
        (2, [0, -1, 4], [1, 1, 2]),
        pytest.param(5, [1, 4, 2], [5, 0, 2], marks=pytest.mark.slow),
    ],
)
def test_against_the_three_ops(tokens, slots, commits, num_k, num_v, taps, device):
    args, state, window = draw(3, tokens, num_k, num_v, taps, device)
    wanted = expected(args, state, window, slots, commits, num_k)
    named = {"slots_B": torch.tensor(slots, device=device), "lower_bound": -5.0, "eps": EPS}
    if commits is not None:
        named["num_commit_B"] = torch.tensor(commits, device=device)
    y = kda_decode(*args, state_SHVK=state, window_SCR=window, **named)
    results = zip((y, state, window), wanted, strict=True)
    assert max(relative_error(a, b) for a, b in results) < 1e-5


def test_one_token_in_blocks_of_values(device):
    args, state, window = draw(3, 1, 24, 40, 4, device)
    wanted = expected(args, state, window, [2, -1, 4], None, 24)
    named = {"slots_B": torch.tensor([2, -1, 4], device=device), "lower_bound": -5.0, "eps": EPS}
    pools = {"state_SHVK": state, "window_SCR": window}
    y = kda_decode(*args, **pools, **named, blocks=StepBlocks(16, 1))
    results = zip((y, state, window), wanted, strict=True)
    assert max(relative_error(a, b) for a, b in results) < 1e-5


@pytest.mark.parametrize("num_k, num_v, states", [(128, 128, 96), (256, 256, 96), (16, 1, 9999)])
def test_blocks_fit_a_program(num_k, num_v, states):
    blocks = choose_decode_blocks(num_k, num_v, states)
    assert blocks.values <= max(16, num_v) and blocks.warps in (1, 2, 4, 8, 16)
    assert blocks.values * num_k <= 32 * 32 * blocks.warps


def test_float16(device):
    args, state, window = draw(2, 2, 32, 32, 4, device, torch.float16)
    wanted = expected(args, state, window, [1, 0], None, 32)
    slots = torch.tensor([1, 0], device=device)
    named = {"slots_B": slots, "lower_bound": -5.0, "eps": EPS}
    y = kda_decode(*args, state_SHVK=state, window_SCR=window, **named)
    results = zip((y, state, window), wanted, strict=True)
    assert y.dtype == torch.float16
    assert max(relative_error(a, b) for a, b in results) < 2e-3


def test_refusals(device):
    args, state, window = draw(2, 1, 16, 16, 4, device)
    slots = torch.tensor([0, 1], device=device)
    named = {"state_SHVK": state, "slots_B": slots, "lower_bound": -5.0, "eps": EPS}
    with pytest.raises(ValueError, match="windows must be"):
        kda_decode(*args, window_SCR=window[..., 1:], **named)
    with pytest.raises(ValueError, match="x must be"):
        kda_decode(args[0][..., 1:], *args[1:], window_SCR=window, **named)
    with pytest.raises(ValueError, match="norm weight"):
        kda_decode(*args[:-1], args[-1][1:], window_SCR=window, **named)
