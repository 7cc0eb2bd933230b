"""kda_chunk as compiled loops against the reference: layouts, sequences, checkpoints, refusals."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk as reference
from k3_core.replay import Recording
from k3_core.testing.values import Values
from k3_kernels.kda_chunk import loops

H, K, V = 4, 8, 5
LENGTHS = (3, 0, 7, 1)
OFFSETS = ((1, 3), (), (4,), (1,))

taken = pytest.mark.usefixtures("no_delegation")


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


def make(lengths=LENGTHS, dtype=torch.float64, key_heads=H, **named):
    """A call whose inputs are parts of one tensor, as a joined product gives them."""
    v, tokens = Values(dtype, "cpu"), sum(lengths)
    widths = (1, key_heads * K, key_heads * K, H * V, H * K, H)
    _, q, k, value, gate, beta = v.act(tokens, sum(widths)).split(widths, dim=-1)
    heads = [x.unflatten(-1, (-1, K)) for x in (q, k)]
    args = [*heads, value.unflatten(-1, (H, V)), gate.unflatten(-1, (H, K)), beta]
    args += [v.full(H, scale=0.3), v.full(H, K)]
    named = {
        "lower_bound": -5.0,
        "cu_seqlens_N1": v.offsets(lengths),
        "initial_state_NHVK": v.full(len(lengths), H, V, K),
        "output_final_state": True,
        **named,
    }
    return args, named


def assert_same(args, named, **tolerance):
    torch.testing.assert_close(
        loops.kda_chunk(*args, **named), reference(*args, **named), **tolerance
    )


@taken
@pytest.mark.parametrize("key_heads", [1, 2, H])
@pytest.mark.parametrize(
    "named",
    [{}, {"lower_bound": None, "scale": 0.3}, {"initial_state_NHVK": None, "seqlens": LENGTHS}],
)
def test_parts_of_a_joined_product(key_heads, named):
    args, named = make(key_heads=key_heads, **named)
    args[3][0, 0, 0] = 30.0
    assert_same(args, named, rtol=0, atol=1e-12)
    assert_same(args, {**named, "output_final_state": False}, rtol=0, atol=1e-12)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in args]
    assert_same(turned, named, rtol=0, atol=1e-12)


@taken
def test_checkpoints_are_the_states_on_the_way_and_change_nothing():
    args, named = make(dtype=torch.float32)
    kept = [torch.full((4, H, V, K), 7.0) for _ in range(2)]
    plain = loops.kda_chunk(*args, **named)
    for op, own in zip((loops.kda_chunk, reference), kept, strict=True):
        o, final = op(*args, **named, checkpoint_offsets=OFFSETS, checkpoints_EHVK=own)
        if op is loops.kda_chunk:
            assert torch.equal(o, plain[0]) and torch.equal(final, plain[1])
    torch.testing.assert_close(*kept)
    assert torch.equal(kept[0][1], plain[1][0]) and torch.equal(kept[0][3], plain[1][3])


@taken
def test_a_sequence_and_a_head_do_not_depend_on_others():
    args, named = make(dtype=torch.float32)
    clean = loops.kda_chunk(*args, **named)
    for x in args[:5]:
        x[:3, 1:2] = float("nan")
    o, final = loops.kda_chunk(*args, **named)
    assert o[:3, 1].isnan().all() and final[0, 1].isnan().all()
    assert torch.equal(o[3:], clean[0][3:]) and torch.equal(final[1:], clean[1][1:])
    assert torch.equal(o[:, 2:], clean[0][:, 2:]) and torch.equal(final[:, 2:], clean[1][:, 2:])


@taken
def test_the_initial_state_stays_and_a_replay_reads_new_inputs():
    args, named = make()
    before = named["initial_state_NHVK"].clone()
    recording = Recording(lambda: loops.kda_chunk(*args, **named))
    assert torch.equal(named["initial_state_NHVK"], before)
    for x in (*args, named["initial_state_NHVK"]):
        x.mul_(0.5)
    recording.replay()
    expected = reference(*args, **named)
    torch.testing.assert_close(recording.result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ({"cu_seqlens_N1": torch.tensor([0, 3, 2, 10, 11])}, "decreases"),
        ({"cu_seqlens_N1": torch.tensor([0, 3, 3, 10, 12])}, "end at"),
        ({"seqlens": (3, 0, 6, 2)}, "differ"),
        ({"seqlens": (3,)}, "differ"),
        ({"initial_state_NHVK": torch.zeros(4, H, K, V, dtype=torch.float64)}, "initial_state"),
        ({"lower_bound": 1.0}, "lower_bound"),
        ({"checkpoint_offsets": OFFSETS}, "together"),
        ({"checkpoint_offsets": ((3, 1), (), (4,), (1,)), "kept": 4}, "increase"),
        ({"checkpoint_offsets": ((1, 4), (), (4,), (1,)), "kept": 4}, "increase"),
        ({"checkpoint_offsets": ((0, 3), (), (4,), (1,)), "kept": 4}, "increase"),
        ({"checkpoint_offsets": OFFSETS[:3], "kept": 3}, "entries"),
        ({"checkpoint_offsets": OFFSETS, "kept": 3}, "checkpoints has shape"),
    ],
)
def test_what_does_not_fit_is_an_error(named, match):
    if "kept" in named:
        kept = torch.zeros(named.pop("kept"), H, V, K, dtype=torch.float64)
        named = {**named, "checkpoints_EHVK": kept}
    args, named = make(**named)
    with pytest.raises(ValueError, match=match):
        loops.kda_chunk(*args, **named)


@pytest.mark.parametrize("number", range(7))
def test_shapes_that_do_not_fit_are_errors(number):
    args, named = make()
    args[number] = args[number][..., 1:]
    with pytest.raises(ValueError, match="kda_chunk"):
        loops.kda_chunk(*args, **named)


def test_more_than_loops_take(monkeypatch):
    args, named = make()
    monkeypatch.setattr(loops, "MAX_UPDATES", sum(LENGTHS) * H * K * V * torch.get_num_threads())
    with monkeypatch.context() as patch:
        patch.setattr(loops, "cpu", None)
        assert_same(args, named, rtol=0, atol=1e-12)
    monkeypatch.setattr(loops, "MAX_UPDATES", loops.MAX_UPDATES - 1)
    monkeypatch.setattr(loops, "launch", None)
    assert_same(args, named, rtol=0, atol=1e-12)
