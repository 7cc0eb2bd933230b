"""The loops on the cases of the conformance battery, without gradients.

The battery asks for gradients where an op has them, and calls with gradients are not for loops.
"""

import pytest
import torch

from k3_core.plugins import resolve
from k3_core.testing import op_cases
from k3_core.testing.compare import compare_op
from k3_kernels.loops_declare import IMPLS

CHECKS = [
    pytest.param(impl, case, dtype, id=f"{impl.implements}-{case.name}-{dtype}")
    for impl in IMPLS
    for case in op_cases(impl.implements)
    for dtype in (torch.float32, torch.float64)
]


@pytest.mark.parametrize(("impl", "case", "dtype"), CHECKS)
def test_a_case(impl, case, dtype):
    reference = resolve("kernel", impl.implements, name="reference").load()
    problems = list(compare_op(impl.load(), reference, case, dtype, "cpu", has_backward=False))
    assert not problems
