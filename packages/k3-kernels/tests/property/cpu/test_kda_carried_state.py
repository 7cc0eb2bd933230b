"""A sequence cut anywhere, its states carried, equals the whole (report 1.1, 1.6, 1.8)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.ops.kda_chunk import reference
from k3_core.ops.kda_segment import apply_map, compose
from k3_core.ops.kda_step.reference import kda_step
from k3_kernels.kda_chunk import cpu
from k3_kernels.kda_segment import cpu as segment
from k3_kernels.short_conv import cpu as conv

H, K, V, W = 2, 8, 6, 4
CHANNELS = H * (2 * K + V)
CUTS = st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple)


def split_qkv(y_TC):
    parts = y_TC.split((H * K, H * K, H * V), dim=-1)
    return [x.unflatten(-1, (H, -1)) for x in parts]


@given(CUTS, st.integers(0, 6), st.integers(0, 2**20))
def test_chunked_prefill_and_decode_equal_one_pass(kda, pieces, num_decoded, seed):
    """Convolution, chunks and decode steps together, against one pass of the recurrence."""
    tokens = sum(pieces) + num_decoded
    *_, gate, beta, A_log, dt_bias, _ = kda.inputs((tokens,), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(tokens, CHANNELS, generator=generator, dtype=torch.float64)
    weight = torch.randn(CHANNELS, 1, W, generator=generator, dtype=torch.float64)
    decay = {"lower_bound": -5.0}

    whole, tail_whole = conv.short_conv(
        x_TC, weight, cu_seqlens_N1=kda.offsets((tokens,)), output_final_state=True
    )
    expected, state_whole = reference.kda_chunk(
        *split_qkv(whole),
        gate,
        beta,
        A_log,
        dt_bias,
        cu_seqlens_N1=kda.offsets((tokens,)),
        output_final_state=True,
        **decay,
    )

    tail = torch.zeros(1, CHANNELS, W - 1, dtype=torch.float64)
    state = torch.zeros(1, H, V, K, dtype=torch.float64)
    outputs, start = [], 0
    for length in (*pieces, *[1] * num_decoded):
        part = slice(start, start + length)
        cu = kda.offsets((length,))
        y, tail = conv.short_conv(
            x_TC[part], weight, cu_seqlens_N1=cu, initial_state_NCW=tail, output_final_state=True
        )
        args = (*split_qkv(y), gate[part], beta[part])
        if start >= sum(pieces):
            step_args = (*(x[None] for x in args), A_log, dt_bias)
            slots = torch.tensor([0])
            o = kda_step(*step_args, state_SHVK=state, slots_B=slots, **decay)[0]
        else:
            o, state = cpu.kda_chunk(
                *args,
                A_log,
                dt_bias,
                cu_seqlens_N1=cu,
                initial_state_NHVK=state,
                output_final_state=True,
                **decay,
            )
        outputs.append(o)
        start += length
    kda.assert_close([torch.cat(outputs), state], [expected, state_whole], 1e-10)
    kda.assert_close([tail], [tail_whole], 1e-12)


@given(CUTS, st.sampled_from([-5.0, None]), st.integers(0, 2**20))
def test_composed_segments_carry_any_state(kda, pieces, lower_bound, seed):
    """The maps of the pieces, composed in any grouping, take the first state to the last."""
    tokens = sum(pieces)
    q, k, v, gate, beta, A_log, dt_bias, state = kda.inputs((tokens,), seed=seed)
    M, S = segment.kda_segment(
        k, v, gate, beta, A_log, dt_bias, lower_bound=lower_bound, cu_seqlens_N1=kda.offsets(pieces)
    )
    maps = [(M[n : n + 1], S[n : n + 1]) for n in range(len(pieces))]
    left = right = None
    for one, last in zip(maps, reversed(maps), strict=True):
        left = one if left is None else compose(left, one)
        right = last if right is None else compose(last, right)
    _, expected = reference.kda_chunk(
        q,
        k,
        v,
        gate,
        beta,
        A_log,
        dt_bias,
        lower_bound=lower_bound,
        cu_seqlens_N1=kda.offsets((tokens,)),
        initial_state_NHVK=state,
        output_final_state=True,
    )
    kda.assert_close([apply_map(state, left), apply_map(state, right)], [expected] * 2, 1e-10)


@given(CUTS.filter(any), st.integers(0, 2**20))
def test_gradients_of_segments_run_apart_equal_those_of_the_whole(kda, pieces, seed):
    """Each segment starts from the composed maps of those before it, as under KCP.

    The decays differ by head and channel, or a segment that read those of another would pass.
    """
    tokens = sum(pieces)
    *inputs, state = kda.inputs((tokens,), seed=seed, heads=3)
    leaves = [x.requires_grad_() for x in inputs]
    weight = torch.randn(tokens, 3, V, generator=torch.Generator().manual_seed(seed)).double()

    def rank(part, start):
        args = (*(x[part] for x in leaves[:5]), *leaves[5:])
        kwargs = {"lower_bound": -5.0, "cu_seqlens_N1": kda.offsets((part.stop - part.start,))}
        o, _ = cpu.kda_chunk(*args, initial_state_NHVK=start, **kwargs)
        return o, segment.kda_segment(*args[1:], **kwargs)

    outputs, before, at = [], None, 0
    for length in pieces:
        start = state if before is None else apply_map(state, before)
        o, own = rank(slice(at, at + length), start)
        outputs.append(o)
        before = own if before is None else compose(before, own)
        at += length
    whole, _ = reference.kda_chunk(
        *leaves, lower_bound=-5.0, cu_seqlens_N1=kda.offsets((tokens,)), initial_state_NHVK=state
    )
    found, expected = (
        torch.autograd.grad((o * weight).sum(), leaves, materialize_grads=True)
        for o in (torch.cat(outputs), whole)
    )
    kda.assert_close([torch.cat(outputs), state, *found], [whole, state, *expected], 1e-10)
