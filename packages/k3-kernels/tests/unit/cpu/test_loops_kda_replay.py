"""kda_replay as compiled loops against the reference: layouts, refused tokens, what they leave."""

import pytest
import torch

from k3_core.ops.kda_replay.reference import kda_replay as reference
from k3_core.testing.values import Values
from k3_kernels.kda_replay import loops
from k3_kernels.loops import MAX_TOKENS

H, K, V, C, R, S = 2, 8, 5, 6, 3, 7
SLOTS, ACCEPTED = (4, 0, -1, 2), (3, 0, 2, 1)

taken = pytest.mark.usefixtures("no_delegation")


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


def make(slots=SLOTS, accepted=ACCEPTED, tokens=3, dtype=torch.float64, num_inputs=R, **named):
    """A call whose gate and x are parts of one tensor, as a joined product gives them."""
    v, lead = Values(dtype, "cpu"), (len(slots), tokens)
    _, gate, x = v.act(*lead, 1 + H * K + C).split((1, H * K, C), dim=-1)
    args = [v.act(*lead, H, K), gate.unflatten(-1, (H, K)), v.full(*lead, H, V)]
    args += [v.full(H, scale=0.3), v.full(H, K)]
    # A slot's states of all layers lie side by side.
    pools = {
        "state_SHVK": v.full(S, 2, H, V, K)[:, 1],
        "window_SCR": v.act(S, 2, C, num_inputs)[:, 1],
    }
    rest = {"slots_B": torch.tensor(slots), "num_accepted_B": torch.tensor(accepted), "x_BWC": x}
    return args, pools, {**rest, "lower_bound": -5.0, **named}


def run(op, args, pools, rest):
    """The pools after the call, which gets copies of the same layout."""
    own = {}
    for name, pool in pools.items():
        own[name] = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool)
    assert op(*args, **own, **rest) is None
    return own


@taken
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("num_inputs", [1, 3, 5])
def test_parts_of_a_joined_product(lower_bound, num_inputs):
    call = make(lower_bound=lower_bound, num_inputs=num_inputs)
    call[0][1][0, 0, 0] = 30.0
    results = (run(op, *call) for op in (loops.kda_replay, reference))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@taken
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refused_tokens_and_other_rows_leave_every_bit(bad):
    call = make(dtype=torch.float32)
    clean = run(loops.kda_replay, *call)
    args, pools, rest = call
    for x in (*args[:3], rest["x_BWC"]):
        x[1:3], x[3, 1:] = bad, bad
    spoilt = run(loops.kda_replay, *call)
    assert all(torch.equal(clean[name], spoilt[name]) for name in pools)
    untouched = [0, 1, 3, 5, 6]
    for name, pool in pools.items():
        assert torch.equal(spoilt[name][untouched], pool[untouched])


@taken
def test_a_row_does_not_depend_on_the_others():
    args, pools, rest = make(dtype=torch.float32)
    alone = [x[:1] for x in args[:3]] + args[3:]
    named = {n: x[:1] if n.endswith(("_B", "_BWC")) else x for n, x in rest.items()}
    found, expected = (
        run(loops.kda_replay, *c) for c in ((args, pools, rest), (alone, pools, named))
    )
    assert all(torch.equal(found[name][4], expected[name][4]) for name in pools)


def test_more_tokens_than_loops_take():
    for tokens, is_taken in ((MAX_TOKENS // 2, True), (MAX_TOKENS // 2 + 1, False)):
        call = make((0, 1), (tokens, 2), tokens)
        with pytest.MonkeyPatch.context() as patch:
            if is_taken:
                patch.setattr(loops, "cpu", None)
            found = run(loops.kda_replay, *call)
        torch.testing.assert_close(found, run(reference, *call), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name, numbers, error",
    [
        ("slots_B", (0, 7, 1, 2), IndexError),
        ("slots_B", (0, -2, 1, 2), IndexError),
        ("slots_B", (2**40, 0, 1, 2), IndexError),
        ("slots_B", (1, 0, 1, 2), ValueError),
        ("num_accepted_B", (0, 4, 0, 0), ValueError),
        ("num_accepted_B", (0, -1, 0, 0), ValueError),
        ("num_accepted_B", (0.0, 1.0, 0.0, 0.0), ValueError),
    ],
)
def test_numbers_that_do_not_fit_are_errors_and_change_nothing(name, numbers, error):
    args, pools, rest = make()
    before = {name: pool.clone() for name, pool in pools.items()}
    with pytest.raises(error, match="kda_replay"):
        loops.kda_replay(*args, **pools, **{**rest, name: torch.tensor(numbers)})
    assert all(torch.equal(pools[name], before[name]) for name in pools)


@pytest.mark.parametrize("number", [*range(5), "state_SHVK", "x_BWC", "slots_B"])
def test_shapes_that_do_not_fit_are_errors(number):
    args, pools, rest = make()
    named = {**pools, **rest}
    if isinstance(number, str):
        named[number] = named[number][..., 1:]
    else:
        args[number] = args[number][..., 1:]
    with pytest.raises(ValueError, match="kda_replay"):
        loops.kda_replay(*args, **named)


def test_other_layouts_and_no_windows_are_left_to_others():
    args, pools, rest = make(dtype=torch.float32)
    expected = run(reference, args, pools, rest)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in args]
    narrow = {**rest, "slots_B": rest["slots_B"].int()}
    for call in ((turned, pools, rest), (args, pools, narrow)):
        torch.testing.assert_close(run(loops.kda_replay, *call), expected)
    states = {"state_SHVK": pools["state_SHVK"]}
    found = run(loops.kda_replay, args, states, {**rest, "x_BWC": None})
    torch.testing.assert_close(found["state_SHVK"], expected["state_SHVK"])
