"""kda_chunk in chunk form: dtypes, modes that must not leak in or out, and what it refuses."""

import pytest
import torch

from k3_core.ops.kda_chunk import reference
from k3_core.plugins import resolve
from k3_core.testing.values import Values
from k3_kernels.kda_chunk import cpu
from k3_kernels.kda_chunk.cpu_gram import tile_width

T, H, K, V = 50, 2, 8, 6
CU = torch.tensor([0, 20, 50])
OPS = pytest.mark.parametrize("op", [cpu.kda_chunk, reference.kda_chunk])


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


def run(op, args, **kwargs):
    return op(*args, **{"lower_bound": -5.0, "cu_seqlens_N1": CU, **kwargs})


def test_the_chunk_form_is_chosen_for_what_loops_do_not_take():
    assert resolve("kernel", "kda_chunk", dtype="bfloat16").chosen.name == "kda_chunk.cpu"


@OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(op, dtype):
    args = inputs(dtype)
    for x in args:
        x.requires_grad_()
    o, final = run(op, args, output_final_state=True)
    exact, exact_final = run(op, [x.detach().float() for x in args], output_final_state=True)
    assert o.dtype == dtype and final.dtype == torch.float32
    assert torch.equal(o, exact.to(dtype)) and torch.equal(final, exact_final)
    grads = torch.autograd.grad(o.float().sum() + final.sum(), args)
    assert [g.dtype for g in grads] == [x.dtype for x in args]


@OPS
def test_autocast_changes_nothing(op):
    args = [x.requires_grad_() for x in inputs()]
    o, _ = run(op, args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o_cast, _ = run(op, args)
        grads = torch.autograd.grad(o_cast.sum(), args)
    assert torch.equal(o, o_cast)
    assert all(map(torch.equal, grads, torch.autograd.grad(o.sum(), args)))


@pytest.mark.parametrize("is_flushing", [False, True])
def test_the_denormal_mode_of_the_caller_stays(is_flushing):
    """With the steepest gates, where the factors themselves would be denormal."""
    if not torch.set_flush_denormal(is_flushing):
        pytest.skip("this processor has no denormal mode")
    try:
        args = inputs()
        args[3] += 1e4
        run(cpu.kda_chunk, [x.requires_grad_() for x in args])[0].sum().backward()
        product = torch.full((4,), 1e-30) * torch.full((4,), 1e-10)
        assert bool((product == 0).all()) is is_flushing
    finally:
        torch.set_flush_denormal(False)


def test_results_repeat_bit_for_bit():
    def once():
        args = [x.requires_grad_() for x in inputs()]
        o, final = run(cpu.kda_chunk, args, output_final_state=True)
        return o, final, *torch.autograd.grad(o.square().sum() + final.sum(), args)

    assert all(map(torch.equal, once(), once()))


def test_no_state_is_kept_without_gradients():
    args = [x.requires_grad_() for x in inputs()]
    with torch.no_grad():
        o, final = run(cpu.kda_chunk, args, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad
    with torch.inference_mode():
        run(cpu.kda_chunk, args)
    assert run(cpu.kda_chunk, args)[0].requires_grad


def test_a_second_derivative_is_refused():
    args = [x.requires_grad_() for x in inputs()]
    o, _ = run(cpu.kda_chunk, args)
    with pytest.raises(RuntimeError, match="choose the implementation"):
        torch.autograd.grad(o.sum(), args[:1], create_graph=True)


@OPS
def test_the_initial_state_is_not_written(op):
    state = torch.randn(2, H, V, K)
    before = state.clone()
    run(op, inputs(), initial_state_NHVK=state, output_final_state=True)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("lower_bound", "width"), [(-5.0, 16), (-2.5, 32), (-0.1, 32), (-41.0, 1), (None, 1)]
)
def test_tiles_keep_exponents_in_range(lower_bound, width):
    assert tile_width(lower_bound, 32) == width


@pytest.mark.parametrize(
    ("change", "kwargs", "message"),
    [
        ({2: torch.zeros(T, H + 1, V)}, {}, "a multiple of key heads"),
        ({}, {"lower_bound": 5.0}, "lower_bound is 5.0"),
        ({}, {"initial_state_NHVK": torch.zeros(2, H, K, V)}, "initial_state has shape"),
        ({}, {"seqlens": (T,)}, "differ from cu_seqlens"),
    ],
)
def test_what_does_not_fit_is_named(change, kwargs, message):
    args = [change.get(i, x) for i, x in enumerate(inputs())]
    with pytest.raises(ValueError, match=message):
        run(cpu.kda_chunk, args, **kwargs)
