"""Every kernel beside KDA on the public conformance cases, against the float64 references."""

from importlib import import_module

import pytest
import torch

from k3_core.testing import op_cases
from k3_core.testing.compare import compare_op
from k3_kernels.ops_declare import IMPLS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = [
    pytest.param(impl, case, dtype, id=f"{impl.implements}-{case.name}-{str(dtype)[6:]}")
    for impl in IMPLS
    for case in op_cases(impl.implements)
    for dtype in DTYPES
    if dtype in case.dtypes and case.features <= impl.features
]


@pytest.mark.parametrize(("impl", "case", "dtype"), CASES)
def test_conformance(impl, case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the Triton interpreter has no bfloat16")
    op = impl.implements
    reference = getattr(import_module(f"k3_core.ops.{op}.reference"), op)
    assert not list(compare_op(impl.load(), reference, case, dtype, device, False))


@pytest.mark.parametrize("impl", [i for i in IMPLS if "backward" in i.features])
def test_calls_that_need_gradients_are_differentiable(impl, device):
    op = impl.implements
    reference = getattr(import_module(f"k3_core.ops.{op}.reference"), op)
    case = next(c for c in op_cases(op) if "return_max" not in c.features)
    assert not list(compare_op(impl.load(), reference, case, torch.float32, device, True))
