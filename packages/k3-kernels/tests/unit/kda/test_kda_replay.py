"""Verify, then replay, against steps of one token in float64 (report 1.8)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.ops.kda_replay.reference import kda_replay as reference
from k3_core.ops.kda_step.reference import kda_step as step_reference
from k3_core.testing import op_cases
from k3_core.testing.compare import compare_op
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_decode.op import kda_decode
from k3_kernels.kda_replay.op import kda_replay
from k3_kernels.kda_step.config import StepBlocks
from k3_kernels.kda_step.op import kda_step

S, H, TAPS, EPS = 4, 2, 4, 1e-5
NAMED = {"lower_bound": -5.0}


def draw(lead, num_k, num_v, device, dtype=torch.float32, seed=0):
    """q, k, v, gate, beta, A_log, dt_bias and the pool."""
    v = Values(dtype, device, seed)
    args = [v.act(*lead, H, num_k), v.act(*lead, H, num_k), v.act(*lead, H, num_v)]
    args += [v.act(*lead, H, num_k), v.act(*lead, H), v.full(H, scale=0.3), v.full(H, num_k)]
    return args, v.full(S, H, num_v, num_k)


def draw_decode(lead, num_k, num_v, device, dtype=torch.float32, seed=0):
    """Arguments of kda_decode, its state pool and its windows."""
    v, channels = Values(dtype, device, seed), H * (2 * num_k + num_v)
    args = [v.act(*lead, channels), v.full(channels, 1, TAPS, scale=0.5), v.act(*lead, H, num_k)]
    args += [v.act(*lead, H), v.full(H, scale=0.3), v.full(H, num_k), v.act(*lead, H, num_v)]
    args += [v.full(num_v, shift=1.0)]
    return args, v.full(S, H, num_v, num_k), v.act(S, channels, TAPS - 1)


def record(args, pool, slots_B, device):
    """A verify step: its outputs and writes; the pool keeps every bit."""
    before = pool.clone()
    writes = torch.full(args[2].shape, float("nan"), device=device)
    o = kda_step(*args, state_SHVK=pool, slots_B=slots_B, **NAMED, writes_BWHV=writes)
    assert torch.equal(pool, before)
    return o, writes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case", [*op_cases("kda_step"), *op_cases("kda_replay")], ids=lambda case: case.name
)
def test_conformance(case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the Triton interpreter has no bfloat16")
    function, exact = {
        "kda_step": (kda_step, step_reference),
        "kda_replay": (kda_replay, reference),
    }[case.op]
    assert not list(compare_op(function, exact, case, dtype, device, False))


@settings(max_examples=4, deadline=None)
@given(st.permutations((-1, 0, 2, 3)), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_replay_equals_steps_of_one_token(slots, accepted):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args, pool = draw((2, 3), 24, 20, device)
    slots_B = torch.tensor(slots[:2], dtype=torch.int32, device=device)
    exact = [x.double() for x in args]
    expected_pool = pool.double()
    expected_o = torch.zeros(args[2].shape, dtype=torch.float64, device=device)
    for w in range(max(accepted)):
        one = [x[:, w : w + 1] for x in exact[:5]]
        live = torch.tensor([s if w < a else -1 for s, a in zip(slots, accepted, strict=False)])
        pool_and_slots = {"state_SHVK": expected_pool, "slots_B": live.to(device)}
        expected_o[:, w] = step_reference(*one, *exact[5:], **pool_and_slots, **NAMED)[:, 0]
    o, writes = record(args, pool, slots_B, device)
    _, k, _, gate, _, A_log, dt_bias = args
    num_accepted = torch.tensor(accepted, device=device)
    named = {"state_SHVK": pool, "slots_B": slots_B, "num_accepted_B": num_accepted, **NAMED}
    kda_replay(k, gate, writes, A_log, dt_bias, **named)
    assert relative_error(pool, expected_pool) < 1e-5
    for row, count in enumerate(accepted):
        assert relative_error(o[row, :count], expected_o[row, :count]) < 1e-5


@pytest.mark.parametrize("blocks", [StepBlocks(16, 1), StepBlocks(32, 2)])
@pytest.mark.parametrize("accepted", [[2, 1, 0], [2, 2, 2]])
def test_fused_verify_and_replay_equal_a_committed_step(accepted, blocks, device):
    args, state, window = draw_decode((3, 2), 16, 24, device, torch.float16)
    x, _, gate, _, A_log, dt_bias, _, _ = args
    slots_B = torch.tensor([3, 9, -1, 9, 0, 9], device=device)[::2]
    num_accepted = torch.tensor(accepted, device=device)
    named = {"slots_B": slots_B, "eps": EPS, **NAMED}
    wanted = state.clone(), window.clone()
    pools = {"state_SHVK": wanted[0], "window_SCR": wanted[1]}
    expected = kda_decode(*args, **pools, **named, num_commit_B=num_accepted)

    before = state.clone(), window.clone()
    # Records may be parts of larger tensors, as when the layers of a model share them.
    keys = torch.zeros(3, 2, 2 * H, 16, device=device, dtype=torch.float16)[:, :, H:]
    writes = torch.zeros(3, 2, 2 * H, 24, device=device)[:, :, H:]
    pools = {"state_SHVK": state, "window_SCR": window}
    y = kda_decode(*args, **pools, **named, keys_BWHK=keys, writes_BWHV=writes, blocks=blocks)
    assert relative_error(y, expected) < 1e-3
    assert torch.equal(state, before[0]) and torch.equal(window, before[1])
    kda_replay(
        keys,
        gate,
        writes,
        A_log,
        dt_bias,
        **pools,
        slots_B=slots_B,
        num_accepted_B=num_accepted,
        **NAMED,
        x_BWC=x,
    )
    assert relative_error(state, wanted[0]) < 1e-5
    assert torch.equal(window, wanted[1])
    kept = [s for s in range(S) if s not in (3, 0)[: 2 if accepted[2] else 1]]
    assert torch.equal(state[kept], before[0][kept])
    assert torch.equal(window[kept], before[1][kept])


def test_layers_side_by_side_are_replayed_at_once(device):
    """Pool [S, L, H, V, K] and records [B, W, L, H, .]: layers are more heads."""
    v, num_layers, lead = Values(torch.float32, device), 3, (2, 3)
    k, gate = v.act(*lead, num_layers, H, 16), v.act(*lead, num_layers, H, 16)
    writes, pool = v.full(*lead, num_layers, H, 8), v.full(S, num_layers, H, 8, 16)
    A_log, dt_bias = v.full(num_layers, H), v.full(num_layers, H, 16)
    x, window = v.act(*lead, num_layers, 10), v.act(S, num_layers, 10, 3)
    named = {
        "slots_B": torch.tensor([2, 0], device=device),
        "num_accepted_B": torch.tensor([1, 3], device=device),
        **NAMED,
    }
    wanted = pool.double(), window.double()
    for i in range(num_layers):
        parts = (t[:, :, i].double() for t in (k, gate, writes))
        pools = {"state_SHVK": wanted[0][:, i], "window_SCR": wanted[1][:, i]}
        decay = A_log[i].double(), dt_bias[i].double()
        reference(*parts, *decay, **pools, **named, x_BWC=x[:, :, i].double())
    kda_replay(
        *(t.flatten(2, 3) for t in (k, gate, writes)),
        A_log.flatten(),
        dt_bias.flatten(0, 1),
        state_SHVK=pool.flatten(1, 2),
        window_SCR=window.flatten(1, 2),
        x_BWC=x.flatten(2),
        **named,
    )
    assert relative_error(pool, wanted[0]) < 1e-5
    assert relative_error(window, wanted[1]) < 1e-6


@pytest.mark.parametrize("counts, slots", [([-3, 4], [0, 1]), ([1, 3], [S, -2])])
def test_counts_and_slots_out_of_range_change_nothing(counts, slots, device, monkeypatch):
    """The host check of the interpreter is taken away: this is what the kernel does on a GPU."""
    monkeypatch.setattr("k3_kernels.kda_replay.op.check_pool", lambda *args: None)
    args, pool = draw((2, 3), 16, 16, device)
    _, k, v, gate, _, A_log, dt_bias = args
    window = torch.ones(S, 6, 3, device=device)
    before = pool.clone(), window.clone()
    kda_replay(
        k,
        gate,
        v,
        A_log,
        dt_bias,
        state_SHVK=pool,
        slots_B=torch.tensor(slots, device=device),
        num_accepted_B=torch.tensor(counts, device=device),
        **NAMED,
        x_BWC=torch.zeros(2, 3, 6, device=device),
        window_SCR=window,
    )
    assert torch.equal(pool, before[0]) and torch.equal(window, before[1])


def test_refusals(device):
    args, pool = draw((2, 2), 16, 16, device)
    _, k, v, gate, _, A_log, dt_bias = args
    slots_B = torch.tensor([0, 1], device=device)
    named = {"state_SHVK": pool, "slots_B": slots_B, "num_accepted_B": slots_B}
    with pytest.raises(ValueError, match="softplus"):
        kda_replay(k, gate, v, A_log, dt_bias, **named, lower_bound=None)
    with pytest.raises(ValueError, match="takes no num_commit"):
        writes = torch.zeros_like(v)
        pool_and_slots = {"state_SHVK": pool, "slots_B": slots_B}
        kda_step(*args, **pool_and_slots, **NAMED, num_commit_B=slots_B, writes_BWHV=writes)
    with pytest.raises(TypeError, match=r"writes is torch\.float16"):
        kda_replay(k, gate, v.half(), A_log, dt_bias, **named, **NAMED)
    with pytest.raises(ValueError, match="window must be contiguous"):
        window = torch.zeros(S, 3, 6, device=device).transpose(1, 2)
        x = torch.zeros(2, 2, 6, device=device)
        kda_replay(k, gate, v, A_log, dt_bias, **named, **NAMED, x_BWC=x, window_SCR=window)


def test_fused_records_must_fit(device):
    args, state, window = draw_decode((2, 2), 16, 16, device)
    slots_B = torch.tensor([0, 1], device=device)
    named = {"state_SHVK": state, "window_SCR": window, "slots_B": slots_B, "eps": EPS, **NAMED}
    keys, writes = torch.zeros(2, 2, H, 16, device=device), torch.zeros(2, 2, H, 16, device=device)
    with pytest.raises(ValueError, match="recorded k must be"):
        kda_decode(*args, **named, keys_BWHK=keys[:, :1], writes_BWHV=writes)
    with pytest.raises(TypeError, match=r"recorded k is torch\.float16"):
        kda_decode(*args, **named, keys_BWHK=keys.half(), writes_BWHV=writes)
    with pytest.raises(ValueError, match="writes has shape"):
        kda_decode(*args, **named, keys_BWHK=keys, writes_BWHV=writes[..., 1:])
