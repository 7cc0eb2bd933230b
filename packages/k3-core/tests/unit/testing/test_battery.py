"""The battery finds what is wrong: each mutant of a right implementation fails its check."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from k3_core.ops.kda_step.reference import kda_step
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.testing import check_impl, checks_of, op_cases, relative_error
from k3_core.testing.battery import resolve_by_name
from k3_core.testing.compare import compare_op
from k3_core.testing.layers import compare_layer
from k3_core.testing.mixers import compare_mixer


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def _scaled(*args: Any, **kwargs: Any) -> Tensor:
    return situ_glu(*args, **kwargs) * 1.001


def _wrong_gradient(gate: Tensor, up: Tensor, **kwargs: Any) -> Tensor:
    return situ_glu(_WrongGradient.apply(gate), up, **kwargs)


def _detached(gate: Tensor, up: Tensor, **kwargs: Any) -> Tensor:
    return situ_glu(gate, up.detach(), **kwargs)


def _misshapen(*args: Any, **kwargs: Any) -> Tensor:
    return situ_glu(*args, **kwargs)[None]


def _not_finite(*args: Any, **kwargs: Any) -> Tensor:
    return situ_glu(*args, **kwargs) * float("nan")


def _problems(function: Callable[..., Any], op: str, reference: Any) -> Iterator[str]:
    for case in op_cases(op):
        yield from compare_op(function, reference, case, torch.float32, "cpu", op == "situ_glu")


def test_the_reference_itself_has_no_problem() -> None:
    assert list(_problems(situ_glu, "situ_glu", situ_glu)) == []
    assert list(_problems(kda_step, "kda_step", kda_step)) == []


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (_scaled, "result 0: relative error 1.00e-03"),
        (_wrong_gradient, "gradient of argument 0: relative error 1.00e-02"),
        (_detached, "gradient of argument 1: relative error 1.00e+00"),
        (_misshapen, "result 0: shape (1, 13, 40)"),
        (_not_finite, "result 0: relative error inf"),
    ],
)
def test_mutants_of_situ_glu_are_found(mutant: Callable[..., Tensor], message: str) -> None:
    assert any(line.startswith(message) for line in _problems(mutant, "situ_glu", situ_glu))


def test_a_state_that_is_not_written_is_found() -> None:
    def forgetful(*args: Any, state_SHVK: Tensor, **kwargs: Any) -> Tensor:
        return kda_step(*args, state_SHVK=state_SHVK.clone(), **kwargs)

    problems = list(_problems(forgetful, "kda_step", kda_step))
    assert problems
    assert all(line.startswith("written state_SHVK") for line in problems)


def test_a_wrong_attention_layer_is_found() -> None:
    from k3_core.attention.kda import KimiDeltaAttention

    class NoGate(KimiDeltaAttention):
        def _output_gate(self, x_TD: Tensor) -> Tensor:
            return torch.zeros_like(super()._output_gate(x_TD))

    impl = resolve_by_name("attention", "kda", "default")
    for case in ("packed", "cached"):
        found = list(compare_layer(NoGate, impl, case, torch.float32, "cpu"))
        assert any(line.startswith("result") for line in found), case
        assert not list(compare_layer(KimiDeltaAttention, impl, case, torch.float32, "cpu"))


def test_a_wrong_feed_forward_is_found() -> None:
    from k3_core.moe.latent import LatentMoE

    class NoShared(LatentMoE):
        def forward(self, x_TD: Tensor, batch: Any) -> Any:
            y_TD, routes = super().forward(x_TD, batch)
            return y_TD - 0.01 * self.shared_experts(x_TD), routes

    impl = resolve_by_name("moe", "latent_moe", "default")
    found = list(compare_layer(NoShared, impl, "packed", torch.float32, "cpu"))
    assert any(line.startswith("result") for line in found)
    assert any(line.startswith("gradient of shared_experts") for line in found)
    assert not list(compare_layer(LatentMoE, impl, "packed", torch.float32, "cpu"))


def test_a_wrong_depth_mixer_is_found() -> None:
    from k3_core.residual.block import BlockAttentionResidual

    class Late(BlockAttentionResidual):
        """Closes a block one layer late: the first reads are still right."""

        def read_attention(self, state: Any, layer: int, site: Any) -> Tensor:
            return super().read_attention(state, layer - (layer > 1), site)

    impl = resolve_by_name("depth_mixer", "block_attn_res", "default")
    found = list(compare_mixer(Late, impl, "reads", torch.float32, "cpu"))
    assert {line.split(":")[0] for line in found} >= {"read 5", "output", "gradient of write 1"}
    assert not [line for line in found if line.startswith(("read 0", "read 1:", "read 2"))]
    assert not list(compare_mixer(BlockAttentionResidual, impl, "reads", torch.float32, "cpu"))


def test_checks_cover_cases_dtypes_and_skip_the_own_oracle() -> None:
    reference = resolve_by_name("kernel", "situ_glu", "reference")
    dtypes = {check.dtype for check in checks_of(reference) if check.device == "cpu"}
    assert dtypes == {torch.float32, torch.bfloat16, torch.float16}
    names = {str(check).split("-")[1] for check in checks_of(reference)}
    assert {"matrix", "saturated"} <= names
    assert check_impl("kernel", "situ_glu", "reference") == len(checks_of(reference))


def test_every_op_has_cases_and_an_unknown_one_is_an_error() -> None:
    from k3_core.ops import OP_NAMES

    assert all(op_cases(op) for op in OP_NAMES)
    with pytest.raises(LookupError, match="no conformance cases"):
        op_cases("nothing")


def test_relative_error() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_error(one, one) == 0.0
    assert relative_error(two, one) == pytest.approx(0.1)
    infinite = torch.tensor([1.0, float("-inf")])
    assert relative_error(infinite, infinite) == 0.0
    assert relative_error(torch.tensor([1.0, 0.0]), infinite) == float("inf")
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
