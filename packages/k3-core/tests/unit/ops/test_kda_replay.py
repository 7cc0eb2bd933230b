"""What kda_replay and a verify step refuse, and that they change nothing then (report 1.8)."""

import pytest
import torch

from k3_core.ops.kda_replay.reference import kda_replay
from k3_core.ops.kda_step.reference import kda_step
from k3_core.testing.values import Values

B, W, S, H, K, V, C = 2, 3, 4, 2, 8, 5, 6


def inputs():
    v = Values(torch.float64, "cpu")
    args = [v.act(B, W, H, K), v.act(B, W, H, K), v.full(B, W, H, V), v.full(H), v.full(H, K)]
    named = {
        "state_SHVK": v.full(S, H, V, K),
        "slots_B": torch.tensor([0, 3]),
        "num_accepted_B": torch.tensor([1, W]),
        "lower_bound": -5.0,
        "x_BWC": v.act(B, W, C),
        "window_SCR": v.act(S, C, 3),
    }
    return args, named


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"slots_B": torch.tensor([0, S])}, IndexError, "slot 4 is outside the pool of 4"),
        ({"slots_B": torch.tensor([1, 1])}, ValueError, "used by two rows"),
        ({"num_accepted_B": torch.tensor([1, W + 1])}, ValueError, "num_accepted 4 is outside 0"),
        ({"num_accepted_B": torch.tensor([-1, 1])}, ValueError, "num_accepted -1"),
        ({"state_SHVK": torch.zeros(S, H, K, V).double()}, ValueError, "state has shape"),
        ({"window_SCR": None}, ValueError, "x and window, or neither"),
        ({"window_SCR": torch.zeros(S, C + 1, 3)}, ValueError, "window must be"),
        ({"x_BWC": torch.zeros(B, W + 1, C)}, ValueError, "x must be"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(named, error, message):
    args, good = inputs()
    before = good["state_SHVK"].clone(), good["window_SCR"].clone()
    with pytest.raises(error, match=message):
        kda_replay(*args, **{**good, **named})
    assert torch.equal(good["state_SHVK"], before[0]) and torch.equal(good["window_SCR"], before[1])


def test_writes_must_fit():
    args, named = inputs()
    with pytest.raises(ValueError, match="writes has shape"):
        kda_replay(args[0], args[1], args[2][:, 1:], *args[3:], **named)
    with pytest.raises(TypeError, match=r"writes is torch\.float32"):
        kda_replay(args[0], args[1], args[2].float(), *args[3:], **named)


def test_a_verify_step_commits_nothing():
    v = Values(torch.float64, "cpu")
    args = [v.act(B, W, H, K), v.act(B, W, H, K), v.act(B, W, H, V), v.act(B, W, H, K)]
    args += [v.act(B, W, H), v.full(H), v.full(H, K)]
    pool = {"state_SHVK": v.full(S, H, V, K), "slots_B": torch.tensor([0, 3])}
    writes = torch.zeros(B, W, H, V).double()
    with pytest.raises(ValueError, match="takes no num_commit"):
        kda_step(
            *args,
            **pool,
            lower_bound=-5.0,
            num_commit_B=torch.tensor([1, 1]),
            writes_BWHV=writes,
        )
