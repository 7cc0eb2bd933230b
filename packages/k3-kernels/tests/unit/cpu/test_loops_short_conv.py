"""short_conv as compiled loops against the reference: layouts, short sequences, refusals."""

import pytest
import torch

from k3_core.ops.short_conv.reference import short_conv as reference
from k3_core.replay import Recording
from k3_core.testing.values import Values
from k3_kernels.short_conv import loops

C = 5
LENGTHS = (6, 0, 1, 2, 9)

taken = pytest.mark.usefixtures("no_delegation")


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


def make(taps=4, dtype=torch.float64, **named):
    """A call on a part of a wider tensor."""
    v = Values(dtype, "cpu")
    named = {
        "cu_seqlens_N1": v.offsets(LENGTHS),
        "initial_state_NCW": v.act(len(LENGTHS), C, taps - 1),
        "output_final_state": True,
        **named,
    }
    return [v.act(sum(LENGTHS), C + 3)[:, 2:-1], v.full(C, 1, taps)], named


def assert_same(args, named):
    results = (op(*args, **named) for op in (loops.short_conv, reference))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@taken
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("named", [{}, {"initial_state_NCW": None}, {"seqlens": LENGTHS}])
def test_sequences_shorter_and_longer_than_their_history(taps, named):
    args, named = make(taps, **named)
    assert_same(args, named)
    assert_same(args, {**named, "output_final_state": False})
    args[1] = args[1].float()
    assert_same(args, {**named, "cu_seqlens_N1": named["cu_seqlens_N1"].int()})


@taken
def test_a_sequence_does_not_depend_on_others():
    args, named = make(dtype=torch.float32)
    clean = loops.short_conv(*args, **named)
    args[0][:6] = float("nan")
    y, final = loops.short_conv(*args, **named)
    assert y[:6].isnan().all() and final[0].isnan().all()
    assert torch.equal(y[6:], clean[0][6:]) and torch.equal(final[1:], clean[1][1:])


@taken
def test_a_replay_reads_new_inputs():
    args, named = make()
    recording = Recording(lambda: loops.short_conv(*args, **named))
    for x in (*args, named["initial_state_NCW"]):
        x.mul_(0.5)
    recording.replay()
    torch.testing.assert_close(recording.result, reference(*args, **named), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ({"cu_seqlens_N1": torch.tensor([0, 6, 5, 7, 9, 18])}, "decreases"),
        ({"cu_seqlens_N1": torch.tensor([0, 6, 6, 7, 9, 19])}, "end at"),
        ({"seqlens": (6, 0, 1, 1, 10)}, "differ"),
        ({"initial_state_NCW": torch.zeros(5, 3, C, dtype=torch.float64)}, "initial_state"),
    ],
)
def test_what_does_not_fit_is_an_error(named, match):
    args, named = make(**named)
    with pytest.raises(ValueError, match=match):
        loops.short_conv(*args, **named)
    with pytest.raises(ValueError, match="weight"):
        loops.short_conv(args[0], args[1][1:], **named)


def test_what_is_left_to_others(monkeypatch):
    monkeypatch.setattr(loops, "launch", None)
    args, named = make()
    for x in (args[0].t().contiguous().t(), args[0].clone().requires_grad_()):
        assert_same([x, args[1]], named)
    monkeypatch.setattr(loops, "MAX_VALUES", args[0].numel() - 1)
    assert_same(args, named)
