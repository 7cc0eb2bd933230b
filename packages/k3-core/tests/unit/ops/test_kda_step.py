"""kda_step against the recurrence from each row's state, and what it refuses (report 1.8)."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk
from k3_core.ops.kda_step.reference import kda_step
from k3_core.testing.values import Values

B, W, S, H, K, V = 3, 4, 6, 2, 8, 5


def inputs(dtype=torch.float64):
    v = Values(dtype, "cpu")
    lead = (B, W, H)
    args = [v.act(*lead, K), v.act(*lead, K), v.act(*lead, V), v.act(*lead, K), v.act(*lead)]
    return [*args, v.full(H, scale=0.3), v.full(H, K)], v.full(S, H, V, K)


def row_by_recurrence(args, state, row, slot, num_tokens):
    """o and the state after the first `num_tokens` tokens of one row."""
    o, final = kda_chunk(
        *(x[row, :num_tokens] for x in args[:5]),
        *args[5:],
        lower_bound=-5.0,
        cu_seqlens_N1=torch.tensor([0, num_tokens]),
        initial_state_NHVK=state[slot : slot + 1],
        output_final_state=True,
    )
    return o, final[0]


@pytest.mark.parametrize("commits", [None, [4, 0, 2], [1, 1, 1]])
@pytest.mark.parametrize("slots", [[4, 0, 5], [-1, 3, 0], [-1, -1, -1]])
def test_rows_follow_the_recurrence(slots, commits):
    args, state = inputs()
    pool = state.clone()
    num_commit = None if commits is None else torch.tensor(commits)
    o = kda_step(
        *args,
        state_SHVK=pool,
        slots_B=torch.tensor(slots),
        lower_bound=-5.0,
        num_commit_B=num_commit,
    )
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not o[row].any()
            continue
        expected, _ = row_by_recurrence(args, state, row, slot, W)
        _, committed = row_by_recurrence(args, state, row, slot, W if not commits else commits[row])
        torch.testing.assert_close(o[row], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(pool[slot], committed, rtol=0, atol=1e-12)
    untouched = [slot for slot in range(S) if slot not in slots]
    assert torch.equal(pool[untouched], state[untouched])


def test_slots_and_pools_of_any_stride():
    args, state = inputs()
    pools = [state.clone(), torch.stack([state, state], dim=1)[:, 1]]
    wide = torch.tensor([4, 9, 0, 9, 5, 9], dtype=torch.int32)
    results = [
        kda_step(*args, state_SHVK=pool, slots_B=slots, lower_bound=-5.0)
        for pool, slots in zip(pools, (torch.tensor([4, 0, 5]), wide[::2]), strict=True)
    ]
    assert torch.equal(*results) and torch.equal(*pools)


def test_half_inputs_with_a_float32_pool():
    args, state = inputs(torch.bfloat16)
    pools = [state.clone(), state.clone()]
    kwargs = {"slots_B": torch.tensor([4, 0, 5]), "lower_bound": None}
    o = kda_step(*args, state_SHVK=pools[0], **kwargs)
    exact = kda_step(*(x.float() for x in args), state_SHVK=pools[1], **kwargs)
    assert torch.equal(o, exact.bfloat16()) and torch.equal(*pools)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"slots_B": torch.tensor([0, 1, S])}, IndexError, "slot 6 is outside the pool of 6"),
        ({"slots_B": torch.tensor([0, 1, -2])}, IndexError, "slot -2"),
        ({"slots_B": torch.tensor([0, 1, 1])}, ValueError, "used by two rows"),
        ({"slots_B": torch.tensor([0, 1])}, ValueError, r"slots must be int32 or int64 \[3\]"),
        (
            {"num_commit_B": torch.tensor([0, 1, W + 1])},
            ValueError,
            r"num_commit 5 is outside 0..4",
        ),
        ({"num_commit_B": torch.tensor([0, 1, -1])}, ValueError, "num_commit -1"),
        ({"state_SHVK": torch.zeros(S, H, K, V).double()}, ValueError, "state has shape"),
        ({"state_SHVK": torch.zeros(S, H, V, K)}, TypeError, "state is torch.float32"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(kwargs, error, message):
    args, state = inputs()
    before = state.clone()
    with pytest.raises(error, match=message):
        kda_step(
            *args,
            **{
                "state_SHVK": state,
                "slots_B": torch.tensor([0, 1, 2]),
                "lower_bound": -5.0,
                **kwargs,
            },
        )
    assert torch.equal(state, before)
