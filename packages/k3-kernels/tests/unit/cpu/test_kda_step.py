"""kda_step and kda_replay in plain torch against the references, states included (report 1.8)."""

import pytest
import torch

from k3_core.ops.kda_replay.reference import kda_replay as replay_reference
from k3_core.ops.kda_step.reference import kda_step as step_reference
from k3_core.testing.values import Values
from k3_kernels.kda_replay.cpu import kda_replay
from k3_kernels.kda_step.cpu import kda_step

B, W, S, H, K, V, C = 4, 3, 7, 2, 8, 5, 6
per_slots = pytest.mark.parametrize("slots", [(4, 0, 6, 2), (-1, 3, 0, -1), (-1, -1, -1, -1)])


def inputs(dtype=torch.float64):
    v = Values(dtype, "cpu")
    lead = (B, W, H)
    args = [v.act(*lead, K), v.act(*lead, K), v.act(*lead, V), v.act(*lead, K), v.act(*lead)]
    return [*args, v.full(H, scale=0.3), v.full(H, K)], v.full(S, H, V, K)


def step(op, args, pool, slots, **named):
    state = pool.clone()
    o = op(*args, state_SHVK=state, slots_B=torch.tensor(slots), **{"lower_bound": -5.0, **named})
    return o, state


@per_slots
@pytest.mark.parametrize("commits", [None, (3, 0, 1, 2), (0, 0, 0, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_outputs_and_states(slots, commits, lower_bound):
    args, pool = inputs()
    named = {"lower_bound": lower_bound, "scale": 0.3}
    if commits is not None:
        named["num_commit_B"] = torch.tensor(commits)
    found, expected = (step(op, args, pool, slots, **named) for op in (kda_step, step_reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    untouched = [slot for slot in range(S) if slot not in slots]
    assert torch.equal(found[1][untouched], pool[untouched])


@per_slots
def test_records_leave_the_states_alone(slots):
    args, pool = inputs()
    records = [torch.full((B, W, H, V), 7.0, dtype=torch.float64) for _ in range(2)]
    results = [
        step(op, args, pool, slots, writes_BWHV=writes)
        for op, writes in zip((kda_step, step_reference), records, strict=True)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(records[0], records[1], rtol=0, atol=1e-12)
    assert torch.equal(results[0][1], pool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32_under_autocast_too(dtype):
    args, pool = inputs(dtype)
    exact = step(step_reference, [x.float() for x in args], pool, (4, 0, 6, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = step(kda_step, args, pool, (4, 0, 6, 2))
    assert o.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(state, exact[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(o.float(), exact[0], rtol=1e-2, atol=1e-2)


def test_a_pool_and_slots_of_any_stride():
    args, pool = inputs()
    wide = torch.zeros(S, H, V, 2 * K, dtype=torch.float64)
    wide[..., ::2] = pool
    slots = torch.tensor([4, 9, 0, 9, 6, 9, 2])[::2]
    named = {"slots_B": slots, "lower_bound": -5.0}
    o = kda_step(*args, state_SHVK=wide[..., ::2], **named)
    expected = step_reference(*args, state_SHVK=pool, **named)
    torch.testing.assert_close((o, wide[..., ::2]), (expected, pool), rtol=0, atol=1e-12)
    assert not wide[..., 1::2].any()


def test_what_does_not_fit_is_named_and_changes_nothing():
    args, pool = inputs()
    before = pool.clone()
    with pytest.raises(IndexError, match="slot 7 is outside"):
        kda_step(*args, state_SHVK=pool, slots_B=torch.tensor([0, 7, 1, 2]), lower_bound=-5.0)
    with pytest.raises(ValueError, match="num_commit 4 is outside"):
        counts = torch.tensor([1, 4, 1, 2])
        slots = torch.tensor([0, 3, 1, 2])
        named = {"slots_B": slots, "num_commit_B": counts, "lower_bound": -5.0}
        kda_step(*args, state_SHVK=pool, **named)
    assert torch.equal(pool, before)


def replay(op, slots, accepted, change=None, lower_bound=-5.0):
    (_, k, _, gate, _, A_log, dt_bias), pool = inputs()
    v = Values(torch.float64, "cpu", seed=1)
    writes, x, window = v.full(B, W, H, V), v.act(B, W, C), v.act(S, C, 3)
    if change:
        change(k, gate, writes, x)
    op(
        *(k, gate, writes, A_log, dt_bias),
        state_SHVK=pool,
        slots_B=torch.tensor(slots),
        num_accepted_B=torch.tensor(accepted),
        lower_bound=lower_bound,
        x_BWC=x,
        window_SCR=window,
    )
    return pool, window


@per_slots
@pytest.mark.parametrize("accepted", [(3, 0, 1, 2), (0, 0, 0, 0), (3, 3, 3, 3)])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_accepted_tokens_are_applied(slots, accepted, lower_bound):
    found, expected = (
        replay(op, slots, accepted, lower_bound=lower_bound)
        for op in (kda_replay, replay_reference)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refused_tokens_and_rows_without_any_leave_every_bit(bad):
    def spoil(*tensors):
        for x in tensors:
            x[0, 1:] = bad
            x[2] = bad

    slots, accepted = (4, 0, 6, 2), (1, 3, 0, 2)
    clean, spoilt = (replay(kda_replay, slots, accepted, change) for change in (None, spoil))
    assert all(map(torch.equal, clean, spoilt))
    assert torch.equal(spoilt[0][6], inputs()[1][6])
