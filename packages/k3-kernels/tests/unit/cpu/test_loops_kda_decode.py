"""kda_decode as compiled loops against the reference: layouts, padded rows, what they leave."""

import pytest
import torch

from k3_core.ops.kda_decode.reference import kda_decode as reference
from k3_core.testing.values import Values
from k3_kernels.kda_decode import loops
from k3_kernels.loops import MAX_TOKENS

H, K, V = 3, 8, 5
C = H * (2 * K + V)
PER_ROW = (0, 2, 3, 6)
"""Arguments that have rows."""

taken = pytest.mark.usefixtures("no_delegation")


@pytest.fixture
def no_delegation(monkeypatch):
    """Calls that the loops leave to others fail."""
    monkeypatch.setattr(loops, "cpu", None)


def make(slots, tokens, dtype=torch.float64, taps=4, has_records=False, **named):
    """A call whose inputs are parts of one tensor, as a joined product gives them."""
    v, lead = Values(dtype, "cpu"), (len(slots), tokens)
    parts = v.act(*lead, 1 + C + H * K + H + H * V).split((1, C, H * K, H, H * V), dim=-1)
    _, x, gate, beta, out_gate = parts
    args = [x, v.full(C, 1, taps), gate.unflatten(-1, (H, K)), beta, v.full(H), v.full(H, K)]
    args += [out_gate.unflatten(-1, (H, V)), v.full(V, shift=1.0)]
    num_slots = max(slots) + 2
    # A slot's states of all layers lie side by side.
    pools = {
        "state_SHVK": v.full(num_slots, 2, H, V, K)[:, 1],
        "window_SCR": v.act(num_slots, 2, C, taps - 1)[:, 1],
    }
    if has_records:
        pools["keys_BWHK"] = torch.full((*lead, H, K), 7.0, dtype=dtype)
        pools["writes_BWHV"] = torch.full((*lead, H, V), 7.0, dtype=dtype)
    rest = {"slots_B": torch.tensor(slots), "lower_bound": -5.0, "eps": 1e-5, **named}
    return args, pools, rest


def run(op, args, pools, rest):
    """y, then what the call wrote to, of which it gets copies of the same layout."""
    own = {}
    for name, pool in pools.items():
        own[name] = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool)
    return {"y": op(*args, **own, **rest), **own}


def some_rows(args, pools, rest, rows):
    """The same call of these rows."""
    args = [x[rows] if number in PER_ROW else x for number, x in enumerate(args)]
    pools = {name: pool[rows] if "_BW" in name else pool for name, pool in pools.items()}
    return args, pools, {**rest, "slots_B": rest["slots_B"][rows]}


@taken
@pytest.mark.parametrize("has_records", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("named", [{}, {"lower_bound": None, "scale": 0.3}])
def test_parts_of_a_joined_product(taps, named, has_records):
    call = make([3, 0, 7, 2], 3, taps=taps, has_records=has_records, **named)
    call[0][2][0, 0, 0] = 30.0
    results = (run(op, *call) for op in (loops.kda_decode, reference))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@taken
@pytest.mark.parametrize("has_records", [False, True])
def test_padded_rows_are_zero_and_touch_nothing(has_records):
    call = make([-1, 4, -1], 2, has_records=has_records)
    for number in PER_ROW:
        call[0][number][::2] = float("nan")
    found = run(loops.kda_decode, *call)
    expected = run(reference, *some_rows(*call, [1]))
    for name, tensor in found.items():
        if name in ("y", "keys_BWHK", "writes_BWHV"):
            assert not tensor[::2].any()
            tensor = tensor[1:2]
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
    untouched = [0, 1, 2, 3, 5]
    for name in ("state_SHVK", "window_SCR"):
        assert torch.equal(found[name][untouched], call[1][name][untouched])


@taken
@pytest.mark.parametrize("has_records", [False, True])
def test_a_row_does_not_depend_on_the_others(has_records):
    call = make([5, 1, 3], 2, dtype=torch.float32, has_records=has_records)
    call[0][0][0] = float("nan")
    call[0][3][2, 1] = float("inf")
    whole, alone = run(loops.kda_decode, *call), run(loops.kda_decode, *some_rows(*call, [1]))
    assert whole["y"][0].isnan().all() and alone["y"].isfinite().all()
    for name in ("state_SHVK", "window_SCR"):
        assert torch.equal(whole[name][1], alone[name][1])
        assert torch.equal(whole[name][::2], call[1][name][::2])
    for name in whole.keys() - {"state_SHVK", "window_SCR"}:
        assert torch.equal(whole[name][1:2], alone[name])


def test_more_tokens_than_loops_take():
    for tokens, is_taken in ((MAX_TOKENS // 2, True), (MAX_TOKENS // 2 + 1, False)):
        call = make([0, 1], tokens)
        with pytest.MonkeyPatch.context() as patch:
            if is_taken:
                patch.setattr(loops, "cpu", None)
            found = run(loops.kda_decode, *call)
        torch.testing.assert_close(found, run(reference, *call), rtol=0, atol=1e-12)


@pytest.mark.parametrize("slots", [[0, 9], [0, -2], [1, 1], [2**40, 0]])
def test_slots_that_do_not_fit_are_errors_and_change_nothing(slots):
    args, pools, rest = make([0, 1], 1)
    before = {name: pool.clone() for name, pool in pools.items()}
    wanted = ValueError if slots == [1, 1] else IndexError
    with pytest.raises(wanted, match=r"slot|index"):
        loops.kda_decode(*args, **pools, **{**rest, "slots_B": torch.tensor(slots)})
    assert all(torch.equal(pools[name], before[name]) for name in pools)


@pytest.mark.parametrize("number", range(8))
def test_shapes_that_do_not_fit_are_errors(number):
    args, pools, rest = make([0, 1], 1, has_records=True)
    args[number] = args[number][..., 1:]
    with pytest.raises(ValueError, match=r"kda_decode|kda_step|gated_rms_norm"):
        loops.kda_decode(*args, **pools, **rest)


def test_one_record_of_the_two_is_an_error():
    args, pools, rest = make([0, 1], 1, has_records=True)
    del pools["writes_BWHV"]
    with pytest.raises(ValueError, match="both or neither"):
        loops.kda_decode(*args, **pools, **rest)


def test_other_layouts_and_dtypes_are_left_to_others():
    args, pools, rest = make([0, 1], 2, dtype=torch.float32)
    expected = run(reference, args, pools, rest)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in args]
    narrow = {**rest, "slots_B": rest["slots_B"].int()}
    for call in ((turned, pools, rest), (args, pools, narrow)):
        torch.testing.assert_close(run(loops.kda_decode, *call), expected)
    half = [x.bfloat16() if number in PER_ROW else x for number, x in enumerate(args)]
    y = run(loops.kda_decode, half, {**pools, "window_SCR": pools["window_SCR"].bfloat16()}, rest)
    torch.testing.assert_close(y["y"].float(), expected["y"], rtol=5e-2, atol=5e-2)
