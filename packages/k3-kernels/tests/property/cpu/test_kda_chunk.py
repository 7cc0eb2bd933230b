"""The chunk form equals the recurrence (report 1.1 to 1.4), gradients included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.kda_chunk import reference
from k3_kernels.kda_chunk import cpu

LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(4, 70), st.sampled_from([16, 31, 32, 33, 64])),
    min_size=1,
    max_size=4,
).map(tuple)
BOUNDS = st.sampled_from([-5.0, -1.0, -30.0, None])
SEEDS = st.integers(0, 2**20)


@given(LENGTHS, BOUNDS, st.sampled_from([0.5, 3.0, 30.0]), SEEDS)
def test_chunk_equals_recurrence_in_float64(kda, lengths, lower_bound, gate_scale, seed):
    inputs = kda.inputs(lengths, seed=seed, gate_scale=gate_scale)
    expected = kda.run_chunk(reference.kda_chunk, inputs, lengths, lower_bound)
    actual = kda.run_chunk(cpu.kda_chunk, inputs, lengths, lower_bound)
    kda.assert_close(actual, expected, 1e-10)


@given(LENGTHS, st.sampled_from([-5.0, None]), SEEDS)
def test_chunk_equals_recurrence_in_float32(kda, lengths, lower_bound, seed):
    inputs = kda.inputs(lengths, seed=seed, dtype=torch.float32)
    exact = tuple(x.double() for x in inputs)
    expected = kda.run_chunk(reference.kda_chunk, exact, lengths, lower_bound)
    kda.assert_close(kda.run_chunk(cpu.kda_chunk, inputs, lengths, lower_bound), expected, 1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, -80.0, None])
@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_saturated_gates(kda, gate, lower_bound):
    """g = 0 and g at its bound (or at -10000 a token) for a whole sequence."""
    lengths = (130,)
    inputs = list(kda.inputs(lengths, dtype=torch.float32))
    inputs[3] = torch.full_like(inputs[3], gate)
    exact = tuple(x.double() for x in inputs)
    expected = kda.run_chunk(reference.kda_chunk, exact, lengths, lower_bound)
    actual = kda.run_chunk(cpu.kda_chunk, tuple(inputs), lengths, lower_bound)
    kda.assert_close(actual, expected, 1e-5)


def test_repeated_keys_stay_exact(kda):
    """All keys equal, next to no decay, beta near 1: a Neumann inverse is NaN here."""
    lengths = (2048,)
    inputs = list(kda.inputs(lengths, heads=1, num_k=32, num_v=4, dtype=torch.float32))
    inputs[1] = inputs[1][:1].expand_as(inputs[1])
    inputs[3] = torch.full_like(inputs[3], -12.0)
    inputs[4] = torch.full_like(inputs[4], 8.0)
    inputs[6] = torch.zeros_like(inputs[6])
    exact = tuple(x.double() for x in inputs)
    expected = kda.run_chunk(reference.kda_chunk, exact, lengths, has_gradients=False)
    actual = kda.run_chunk(cpu.kda_chunk, tuple(inputs), lengths, has_gradients=False)
    kda.assert_close(actual, expected, 1e-5)


@given(LENGTHS, SEEDS)
def test_packed_documents_equal_separate_ones(kda, lengths, seed):
    inputs = kda.inputs(lengths, seed=seed)
    o, final = kda.run_chunk(cpu.kda_chunk, inputs, lengths, has_gradients=False)
    for n, o_n in enumerate(o.split(lengths)):
        one = [x.split(lengths)[n] for x in inputs[:5]]
        alone = kda.run_chunk(
            cpu.kda_chunk,
            (*one, *inputs[5:7], inputs[7][n : n + 1]),
            (lengths[n],),
            has_gradients=False,
        )
        kda.assert_close([o_n, final[n : n + 1]], alone, 1e-10)


@pytest.mark.parametrize("foreign", [7.0, float("nan"), float("inf")])
@pytest.mark.parametrize("op", [cpu.kda_chunk, reference.kda_chunk])
def test_a_document_does_not_see_its_neighbour(kda, op, foreign):
    """Whatever stands in the first document, the second has the same bits, gradients too."""
    lengths = (45, 37)
    inputs = kda.inputs(lengths, dtype=torch.float32)
    changed = [x.clone() for x in inputs]
    for x in (*changed[:5], changed[7]):
        x[: 45 if len(x) == 82 else 1] = foreign
    before, after = (kda.run_chunk(op, tuple(x), lengths) for x in (inputs, changed))
    for name in (0, 2, 3, 4, 5, 6):
        assert torch.equal(before[name][45:], after[name][45:])
    for name in (1, 9):
        assert torch.equal(before[name][1], after[name][1])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple), SEEDS)
def test_memory_behind_the_inputs_is_not_read(kda, lengths, seed):
    """The inputs are the head of a longer buffer full of NaN (T % chunk != 0 reads past it)."""
    inputs = kda.inputs(lengths, seed=seed, dtype=torch.float32)
    poisoned = []
    for x in inputs:
        buffer = torch.full((len(x) + 64, *x.shape[1:]), float("nan"))
        buffer[: len(x)] = x
        poisoned.append(buffer[: len(x)])
    bound_and_cuts = {"lower_bound": -5.0, "cu_seqlens_N1": kda.offsets(lengths)}
    clean, found = (
        cpu.kda_chunk(*x[:7], initial_state_NHVK=x[7], output_final_state=True, **bound_and_cuts)
        for x in (inputs, poisoned)
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))


def test_many_chunks_of_ragged_documents(kda):
    """More than 1024 chunks, with a remainder of 15 tokens in the second document."""
    lengths = (2 * 32, 32 + 15, 1) + (1,) * 1020
    inputs = kda.inputs(lengths, heads=1, num_k=4, num_v=4)
    expected = kda.run_chunk(reference.kda_chunk, inputs, lengths)
    kda.assert_close(kda.run_chunk(cpu.kda_chunk, inputs, lengths), expected, 1e-10)
