"""custom_op on an implementation made up here: what runs plainly, in a graph and in a backward."""

from functools import partial

import pytest
import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.custom_op.arguments import LOWERINGS, Function, Signature, Stack
from k3_core.custom_op.decorator import IMPLEMENTATIONS
from k3_core.ops import OP_NAMES
from k3_core.ops.rms_norm.reference import rms_norm
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.quant import MXTensor

EPS = 1e-6
calls: list[str] = []


def seen(word: str) -> None:
    calls.append(word)


def norm_backward(grads, saved, needs, weight_D):
    seen(f"backward {dict(needs)}")
    (normed,) = saved
    return {
        "x": grads[0] * weight_D if needs["x"] else None,
        "weight_D": (grads[0] * normed).sum(0) if needs["weight_D"] else None,
    }


def norm_forward(needs, x, weight_D, eps):
    seen("forward")
    normed = x + eps
    return normed * weight_D, (normed,)


@custom_op(
    "rms_norm.scale",
    forward=norm_forward,
    backward=norm_backward,
    saved=lambda needs, x, weight_D, eps: (x.new_empty(x.shape),),
)
def scale(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    seen("run")
    return (x + eps) * weight_D


@custom_op("situ_glu.looked_at")
def looked_at(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """It reads a value on the host, and its product obeys autocast."""
    seen("autocast" if torch.is_autocast_enabled("cpu") else "run")
    return torch.mm(gate, up.mT).to(gate.dtype) * (1.0 if gate.sum().item() > 0 else 2.0)


@pytest.fixture(autouse=True)
def fresh():
    calls.clear()
    torch._dynamo.reset()


def inputs(*needs: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(3, 4, generator=generator), torch.rand(4, generator=generator)
    return x.requires_grad_(needs[0]), weight.requires_grad_(needs[1])


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_backward_gets_what_it_names_and_says_what_is_needed(wrap, needs):
    x, weight = inputs(*needs)
    function = wrap(scale)
    y = function(x, weight, eps=EPS)
    y.sum().backward()
    assert calls == ["forward", f"backward {dict(zip(('x', 'weight_D'), needs, strict=True))}"]
    assert torch.equal(y, (x + EPS) * weight)
    if needs[0]:
        assert torch.equal(x.grad, weight.expand(3, 4))
    if needs[1]:
        torch.testing.assert_close(weight.grad, (x + EPS).sum(0).detach())


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_without_gradients_only_the_function_runs(wrap):
    function = wrap(scale)
    with torch.no_grad():
        function(*inputs(True, True), eps=EPS)
    function(*inputs(False, False), eps=EPS)
    assert calls == ["run", "run"]


def test_only_what_the_backward_names_is_kept():
    x, weight = inputs(True, True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scale(x, weight, eps=EPS)
    assert not any(t is x for t in kept) and any(t is weight for t in kept)


def test_no_gradient_of_the_result_is_none_of_the_arguments():
    x, weight = inputs(True, True)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, d_y):
            return None

    y = Nothing.apply(scale(x, weight, eps=EPS))
    found = torch.autograd.grad(y.sum(), (x, weight), allow_unused=True)
    assert found == (None, None) and calls == ["forward"]


def test_second_derivatives_are_refused():
    x, weight = inputs(True, True)
    loss = scale(x, weight, eps=EPS).sum()
    with pytest.raises(RuntimeError, match=r"rms_norm\.reference"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_differentiable_function_runs_again_in_the_backward_of_a_graph():
    x, y = (torch.rand(4, 4, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(looked_at(x, y, beta=1.0, linear_beta=None).sum(), (x, y))
    calls.clear()
    result = compiled(looked_at)(x, y, beta=1.0, linear_beta=None)
    found = torch.autograd.grad(result.sum(), (x, y))
    assert calls == ["run", "run"]
    torch.testing.assert_close(found, expected)


def test_a_graph_keeps_the_autocast_that_it_was_traced_in():
    x = torch.rand(4, 4, requires_grad=True)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return looked_at(x, x, beta=1.0, linear_beta=None)

    expected = inside(x)
    calls.clear()
    result = compiled(inside)(x)
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert calls == ["autocast", "autocast"]
    assert torch.equal(result, expected) and grad.dtype == torch.float32


def test_is_right_inside_checkpoints():
    x, weight = inputs(True, True)

    def step(x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: scale(x.sin(), weight, eps=EPS).cos(), x, use_reentrant=False
        )

    expected = torch.autograd.grad(scale(x.sin(), weight, eps=EPS).cos().sum(), (x, weight))
    for function in (step, compiled(step)):
        found = torch.autograd.grad(function(x).sum(), (x, weight))
        torch.testing.assert_close(found, expected)


def test_arguments_of_an_implementation_are_refused_in_a_graph():
    def tuned(x):
        return scale(x, x[0], eps=EPS, tile=3)

    with pytest.raises(Exception, match=r"takes the op's arguments: \['tile'\]"):
        compiled(tuned)(torch.ones(2, 2))


def test_importing_an_implementation_registers_nothing():
    custom_op("rms_norm.never_traced")(rms_norm)
    assert "rms_norm.never_traced" in IMPLEMENTATIONS
    assert not hasattr(torch.ops.k3, "rms_norm_never_traced")


@pytest.mark.parametrize("op", OP_NAMES)
def test_every_op_says_what_its_results_look_like(op):
    own = custom_op(f"{op}.unused")(lambda: None)
    signature = IMPLEMENTATIONS[f"{op}.unused"].signature
    assert own is not None and signature.names
    torch._C.parse_schema(f"k3::{op}({signature.schema()}) -> Tensor[]")


# -- lowering ------------------------------------------------------------------------------------


def round_trip(kind, value):
    lowering = LOWERINGS[kind]
    plain = lowering.lower(value)
    assert len(plain) == len(lowering.types)
    return lowering.restore(*plain)


def test_activations_go_by_name():
    assert round_trip(Function, situ_glu) is situ_glu
    found = round_trip(Function, partial(situ_glu, beta=4.0, linear_beta=None))
    assert found.func is situ_glu and found.keywords == {"beta": 4.0, "linear_beta": None}


def test_an_activation_without_a_name_is_refused():
    with pytest.raises(TypeError, match="cannot be found by its name"):
        round_trip(Function, lambda gate, up: gate * up)


def test_packed_stacks_and_lists_of_lists_come_back():
    packed = MXTensor(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    found = round_trip(Stack, packed)
    assert found.packed is packed.packed and found.scale is packed.scale
    offsets = ((3, 5), (), (1,))
    assert round_trip(tuple[tuple[int, ...], ...] | None, offsets) == offsets


def test_an_annotation_that_cannot_be_lowered_is_an_error():
    def meta(x: set) -> Tensor:
        raise NotImplementedError

    with pytest.raises(KeyError):
        Signature("mine", meta)
