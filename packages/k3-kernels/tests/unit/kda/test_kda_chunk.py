"""kda_chunk's kernels against the float64 recurrence (report 1.1, 1.2; issue 3's tolerances)."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk as reference
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_chunk.config import TF32X3, Blocks
from k3_kernels.kda_chunk.op import kda_chunk

WIDE = Blocks(32, 32, channels=16)
TWO = Blocks(32, 16)
ONE = Blocks(16, 16)


def draw(lengths, heads, num_k, num_v, device, dtype=torch.float32, gate=(1.0, 0.0), seed=0):
    """The seven inputs, cu_seqlens and an initial state; gate: scale and shift of the raw gate."""
    v, total = Values(dtype, device, seed), sum(lengths)
    args = [v.act(total, heads, n) for n in (num_k, num_k, num_v)]
    args.append(v.act(total, heads, num_k, scale=gate[0]) + gate[1])
    args.append(v.act(total, heads))
    args += [v.full(heads, scale=0.3), v.full(heads, num_k, scale=0.5)]
    return args, v.offsets(lengths), v.full(len(lengths), heads, num_v, num_k)


def errors(args, offsets, state, bound=-5.0, **options):
    """Relative errors of o and of the final state."""
    named = {"lower_bound": bound, "cu_seqlens_N1": offsets, "output_final_state": True}
    o, final = kda_chunk(*args, **named, initial_state_NHVK=state, **options)
    expected = reference(
        *(x.double() for x in args),
        **named,
        initial_state_NHVK=None if state is None else state.double(),
    )
    assert o.dtype == args[2].dtype and final.dtype == torch.float32
    return [relative_error(a, b) for a, b in zip((o, final), expected, strict=True)]


@pytest.mark.parametrize("blocks", [WIDE, TWO, ONE])
@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), (5, 1, 0, 67), (0, 0, 33)])
def test_lengths(lengths, blocks, device):
    assert max(errors(*draw(lengths, 2, 16, 16, device), blocks=blocks)) < 1e-5


@pytest.mark.parametrize("num_k, num_v", [(24, 40), (64, 16), (16, 64), (17, 1), (100, 20)])
def test_head_dimensions(num_k, num_v, device):
    assert max(errors(*draw((70,), 1, num_k, num_v, device), blocks=WIDE)) < 1e-5


def test_default_blocks_and_no_initial_state(device):
    args, offsets, _ = draw((90, 3), 3, 32, 32, device)
    assert max(errors(args, offsets, None)) < 1e-5


@pytest.mark.parametrize("blocks", [WIDE, TWO])
@pytest.mark.parametrize(
    "gate, bound",
    [((1.0, -9.0), -5.0), ((0.0, 60.0), -5.0), ((0.0, -60.0), -5.0), ((8.0, 0.0), -0.5)],
)
def test_gates_from_bound_to_bound(gate, bound, blocks, device):
    args, offsets, state = draw((130,), 1, 32, 16, device, gate=gate)
    assert max(errors(args, offsets, state, bound, blocks=blocks)) < 1e-5


def repeated_keys(kind, dtype, device):
    args, offsets, state = draw((192,), 1, 32, 32, device, dtype)
    noise = args[1]
    if kind == "equal":
        args[1] = noise[:1].expand_as(noise).clone()
        args[3].fill_(-12.0), args[4].fill_(8.0), args[5].zero_(), args[6].zero_()
    else:
        args[1] = noise[:1] + 0.4 * noise
        args[3].fill_(-6.0), args[4].fill_(3.0)
    return args, offsets, state


@pytest.mark.parametrize("kind", ["equal", "correlated"])
@pytest.mark.parametrize("blocks", [WIDE, ONE])
def test_repeated_keys_float32(kind, blocks, device):
    assert max(errors(*repeated_keys(kind, torch.float32, device), blocks=blocks)) < 1e-4


@pytest.mark.parametrize("kind", ["equal", "correlated"])
def test_repeated_keys_float16(kind, device):
    inputs = repeated_keys(kind, torch.float16, device)
    assert max(errors(*inputs, blocks=WIDE, precision=TF32X3)) < 2e-2


@pytest.mark.parametrize("gate", [(1.0, 0.0), (1.0, -6.5)])
def test_float16(gate, device):
    args, offsets, state = draw((100, 29), 2, 32, 32, device, torch.float16, gate)
    assert max(errors(args, offsets, state, blocks=WIDE)) < 2e-3


@pytest.mark.parametrize(
    "segment_chunks, has_state",
    [
        (2, True),
        (3, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_segments_compose_to_the_uncut_sequence(segment_chunks, has_state, device):
    args, offsets, state = draw((100, 0, 17, 70), 2, 16, 32, device, gate=(1.0, -4.0))
    options = {"blocks": ONE, "segment_chunks": segment_chunks}
    assert max(errors(args, offsets, state if has_state else None, **options)) < 1e-5


@pytest.mark.parametrize("segment_chunks", [0, 2])
@pytest.mark.parametrize("has_state", [True, False])
def test_slabs_hand_states_on(segment_chunks, has_state, device):
    args, offsets, state = draw((100, 0, 17, 70), 2, 16, 16, device, gate=(1.0, -4.0))
    options = {"blocks": ONE, "segment_chunks": segment_chunks, "num_slabs": 3}
    assert max(errors(args, offsets, state if has_state else None, **options)) < 1e-5


def test_what_lies_outside_the_tensors_is_not_read(device):
    args, offsets, state = draw((20, 45), 2, 24, 24, device)
    for index in range(5):
        x = args[index]
        buffer = torch.full((x.shape[0] + 64, *x.shape[1:]), torch.nan, device=device)
        buffer[: x.shape[0]] = x
        args[index] = buffer[: x.shape[0]]
    assert max(errors(args, offsets, state, blocks=WIDE)) < 1e-5


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("index", range(5))
def test_what_is_not_finite_stays_in_its_sequence(index, value, device):
    args, offsets, state = draw((20, 37, 20), 1, 16, 16, device)
    clean, final_clean = kda_chunk(
        *args,
        lower_bound=-5.0,
        cu_seqlens_N1=offsets,
        initial_state_NHVK=state,
        output_final_state=True,
        blocks=WIDE,
    )
    args[index][30] = value
    o, final = kda_chunk(
        *args,
        lower_bound=-5.0,
        cu_seqlens_N1=offsets,
        initial_state_NHVK=state,
        output_final_state=True,
        blocks=WIDE,
    )
    assert torch.equal(o[:20], clean[:20]) and torch.equal(o[57:], clean[57:])
    assert torch.equal(final[::2], final_clean[::2])


def test_strided_inputs(device):
    args, offsets, state = draw((40,), 2, 16, 16, device)
    packed = torch.cat(args[:3], dim=-1)
    args[:3] = packed.split(16, dim=-1)
    args[3] = args[3].transpose(1, 2).contiguous().transpose(1, 2)
    args[4] = args[4].t().contiguous().t()
    assert not any(x.is_contiguous() for x in args[:5])
    assert max(errors(args, offsets, state, blocks=TWO)) < 1e-5


def test_offsets_beyond_32_bits(device):
    args, offsets, state = draw((150,), 1, 16, 16, device, torch.float16)
    row = 1 << 24
    for index in (1, 2):
        storage = torch.empty(150 * row, dtype=torch.float16, device=device)
        far = storage.as_strided((150, 1, 16), (row, 16, 1))
        args[index] = far.copy_(args[index])
    assert max(errors(args, offsets, state, blocks=WIDE)) < 2e-3


def test_scale(device):
    args, offsets, state = draw((40,), 1, 16, 16, device)
    named = {"lower_bound": -5.0, "cu_seqlens_N1": offsets, "initial_state_NHVK": state}
    plain, final = kda_chunk(*args, **named, blocks=TWO)
    doubled, _ = kda_chunk(*args, **named, scale=0.5, blocks=TWO)
    assert final is None
    torch.testing.assert_close(doubled, plain * 2, rtol=1e-5, atol=1e-6)


def test_gradients_come_from_the_torch_form(device):
    args, offsets, _ = draw((20,), 1, 16, 16, device)
    args[1].requires_grad_()
    o, _ = kda_chunk(*args, lower_bound=-5.0, cu_seqlens_N1=offsets)
    o.sum().backward()
    assert args[1].grad.isfinite().all() and args[1].grad.any()


@pytest.mark.parametrize("bound", [None, -5.5])
def test_bounds_that_cannot_be_anchored_are_refused(bound, device):
    args, offsets, _ = draw((20,), 1, 16, 16, device)
    with pytest.raises(ValueError, match=r"kda_chunk\.cpu"):
        kda_chunk(*args, lower_bound=bound, cu_seqlens_N1=offsets)


def test_dtypes_and_head_dimensions_are_refused_by_name(device):
    args, offsets, _ = draw((20,), 1, 16, 16, device, torch.float64)
    with pytest.raises(TypeError, match="float64"):
        kda_chunk(*args, lower_bound=-5.0, cu_seqlens_N1=offsets)
    args, offsets, _ = draw((4,), 1, 257, 16, device)
    with pytest.raises(ValueError, match="257"):
        kda_chunk(*args, lower_bound=-5.0, cu_seqlens_N1=offsets)


def test_other_numbers_of_value_heads_are_refused(device):
    args, offsets, _ = draw((20,), 2, 16, 16, device)
    args[2] = torch.cat([args[2], args[2][:, :1]], dim=1)
    with pytest.raises(ValueError, match="a multiple of key heads"):
        kda_chunk(*args, lower_bound=-5.0, cu_seqlens_N1=offsets)
