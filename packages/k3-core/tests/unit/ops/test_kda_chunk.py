"""kda_chunk: what the reference refuses, and what it leaves alone."""

import pytest
import torch

from k3_core.ops.kda_chunk.reference import kda_chunk
from k3_core.testing.values import Values

T, H, K, V = 50, 2, 8, 6
CU = torch.tensor([0, 20, 50])


def inputs(dtype=torch.float32):
    v = Values(dtype, "cpu")
    return [
        v.act(T, H, K),
        v.act(T, H, K),
        v.act(T, H, V),
        v.act(T, H, K, scale=3.0),
        v.act(T, H),
        v.full(H, scale=0.3),
        v.full(H, K),
    ]


def run(args, **kwargs):
    return kda_chunk(*args, **{"lower_bound": -5.0, "cu_seqlens_N1": CU, **kwargs})


def test_the_initial_state_is_not_written():
    state = torch.randn(2, H, V, K)
    before = state.clone()
    run(inputs(), initial_state_NHVK=state, output_final_state=True)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({2: torch.zeros(T, H + 1, V)}, ValueError, "v has shape .* a multiple of key heads"),
        ({3: torch.zeros(T, H)}, ValueError, "gate has shape"),
        ({4: torch.zeros(T, H, 1)}, ValueError, "beta has shape"),
        ({5: torch.zeros(H + 1)}, ValueError, "A_log has shape"),
        ({6: torch.zeros(H * K)}, ValueError, "dt_bias has shape"),
        ({0: torch.zeros(T, H, K, dtype=torch.int64)}, TypeError, "q is torch.int64"),
        ({1: torch.zeros(T, H, K, dtype=torch.float64)}, TypeError, "need one dtype"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change, error, message):
    args = [change.get(i, x) for i, x in enumerate(inputs())]
    with pytest.raises(error, match=message):
        run(args)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"lower_bound": 5.0}, ValueError, "lower_bound is 5.0"),
        ({"lower_bound": float("-inf")}, ValueError, "lower_bound is -inf"),
        ({"initial_state_NHVK": torch.zeros(2, H, K, V)}, ValueError, "initial_state has shape"),
        (
            {"initial_state_NHVK": torch.zeros(2, H, V, K, dtype=torch.bfloat16)},
            TypeError,
            "initial_state is torch.bfloat16",
        ),
    ],
)
def test_settings_and_states_that_do_not_fit_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        run(inputs(), **kwargs)


def test_a_checkpoint_is_the_final_state_of_the_tokens_before_it():
    args = inputs(torch.float64)
    checkpoints = torch.zeros(3, H, V, K, dtype=torch.float64)
    run(args, checkpoint_offsets=((3, 20), (7,)), checkpoints_EHVK=checkpoints)
    for row, (first, last) in zip(checkpoints, [(0, 3), (0, 20), (20, 27)], strict=True):
        prefix = [x[first:last] for x in args[:5]] + args[5:]
        offsets = torch.tensor([0, last - first])
        _, final = run(prefix, cu_seqlens_N1=offsets, output_final_state=True)
        assert torch.allclose(row, final[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("offsets", "shape", "message"),
    [
        (None, (1, H, V, K), "together"),
        (((1,),), (1, H, V, K), "has 1 entries"),
        (((1,), (31,)), (2, H, V, K), r"within 1..30"),
        (((5, 2), ()), (2, H, V, K), "have to increase"),
        (((5,), ()), (2, H, V, K), "checkpoints has shape"),
    ],
)
def test_checkpoints_that_do_not_fit_are_named(offsets, shape, message):
    with pytest.raises(ValueError, match=message):
        run(inputs(), checkpoint_offsets=offsets, checkpoints_EHVK=torch.zeros(shape))


def test_value_heads_share_the_key_head_of_their_group():
    args = inputs()
    grouped = [args[0][:, :1], args[1][:, :1], *args[2:]]
    full = [x.expand(-1, H, -1) for x in grouped[:2]] + args[2:]
    assert torch.equal(run(grouped)[0], run(full)[0])
