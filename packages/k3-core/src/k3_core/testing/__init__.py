"""The public conformance battery: any registered implementation against the reference.

    from k3_core.testing import check_impl, conformance_params

    check_impl("kernel", "situ_glu", "my_plugin.situ_glu")

    @pytest.mark.parametrize("check", conformance_params(kind="attention"))
    def test_conformance(check):
        check()

Ops are compared with `<op>.reference` run in float64 on the same rounded inputs; attention and
feed-forward layers and depth mixers with the `<name>.default` one in float64 on the reference ops.
Of other kinds the target has to import. Source: design 3, repository.md 7.3.
"""

from k3_core.testing.battery import (
    Check,
    ConformanceError,
    check_impl,
    checks_of,
    conformance_params,
)
from k3_core.testing.cases import Case, op_cases
from k3_core.testing.tolerance import TOLERANCE, relative_error

__all__ = [
    "TOLERANCE",
    "Case",
    "Check",
    "ConformanceError",
    "check_impl",
    "checks_of",
    "conformance_params",
    "op_cases",
    "relative_error",
]
