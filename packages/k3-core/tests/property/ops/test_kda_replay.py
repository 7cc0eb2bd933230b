"""Verify W tokens and replay a of them = step a tokens one by one (report 1.8)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.kda_replay.reference import kda_replay
from k3_core.ops.kda_step.reference import kda_step
from k3_core.ops.short_conv.reference import short_conv
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values

S, H, K, V, TAPS = 5, 2, 6, 4, 4
CHANNELS = H * (2 * K + V)


@st.composite
def verified_rows(draw):
    """Slots (padded rows -1), tokens a row and how many of them each row accepts."""
    slots = draw(st.permutations(range(S)).map(lambda order: order[:3]))
    slots = [-1 if draw(st.integers(0, 3)) == 0 else slot for slot in slots]
    num_tokens = draw(st.integers(1, 6))
    return slots, num_tokens, [draw(st.integers(0, num_tokens)) for _ in slots]


def convolved(x_WC, weight, window_CR):
    """q, k, v [W, H, .] of one row and the window after it."""
    offsets = torch.tensor([0, len(x_WC)])
    y, last = short_conv(
        x_WC,
        weight,
        cu_seqlens_N1=offsets,
        initial_state_NCW=window_CR[None],
        output_final_state=True,
    )
    return [t.unflatten(-1, (H, -1)) for t in y.split((H * K, H * K, H * V), -1)], last[0]


@given(verified_rows(), st.sampled_from([-5.0, None]), st.integers(0, 2**20))
def test_replay_equals_steps_of_one_token(rows, lower_bound, seed):
    slots, num_tokens, accepted = rows
    v = Values(torch.float64, "cpu", seed)
    lead = (len(slots), num_tokens)
    x, weight = v.act(*lead, CHANNELS), v.full(CHANNELS, 1, TAPS)
    gate, beta, decay = v.act(*lead, H, K), v.act(*lead, H), (v.full(H), v.full(H, K))
    state, window = v.full(S, H, V, K), v.act(S, CHANNELS, TAPS - 1)
    named = {"lower_bound": lower_bound}

    expected_state, expected_window = state.clone(), window.clone()
    expected_o = torch.zeros(*lead, H, V, dtype=torch.float64)
    for row, slot in enumerate(slots):
        for w in range(accepted[row] if slot >= 0 else 0):
            qkv, last = convolved(x[row, w : w + 1], weight, expected_window[slot])
            one = [t[row : row + 1, w : w + 1] for t in (gate, beta)]
            expected_o[row, w] = kda_step(
                *(t[None] for t in qkv),
                *one,
                *decay,
                state_SHVK=expected_state,
                slots_B=torch.tensor([slot]),
                **named,
            )[0, 0]
            expected_window[slot] = last

    before = state.clone(), window.clone()
    parts = [convolved(x[row], weight, window[max(slot, 0)])[0] for row, slot in enumerate(slots)]
    q, k, value = (torch.stack(part) for part in zip(*parts, strict=True))
    writes = torch.full((*lead, H, V), float("nan"), dtype=torch.float64)
    pool = {"state_SHVK": state, "slots_B": torch.tensor(slots)}
    o = kda_step(q, k, value, gate, beta, *decay, **pool, **named, writes_BWHV=writes)
    assert torch.equal(state, before[0])
    kda_replay(
        k,
        gate,
        writes,
        *decay,
        **pool,
        **named,
        num_accepted_B=torch.tensor(accepted),
        x_BWC=x,
        window_SCR=window,
    )

    for row, count in enumerate(accepted):
        assert relative_error(o[row, :count], expected_o[row, :count]) < 1e-12
    assert relative_error(state, expected_state) < 1e-12
    assert relative_error(window, expected_window) < 1e-12
    moved = [slot for slot, count in zip(slots, accepted, strict=True) if slot >= 0 and count]
    others = [slot for slot in range(S) if slot not in moved]
    assert torch.equal(state[others], before[0][others])
    assert torch.equal(window[others], before[1][others])
