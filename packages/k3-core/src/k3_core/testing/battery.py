"""Which checks an implementation has to pass, and how they are run and named."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from k3_core.errors import K3Error
from k3_core.plugins import Impl, Request, ensure_plugins, resolve
from k3_core.plugins.filters import device_capability, reason_against, unmet_requirement
from k3_core.testing.cases import ALL_DTYPES, Case, op_cases
from k3_core.testing.compare import compare_op
from k3_core.testing.layers import LAYER_CASES, compare_layer
from k3_core.testing.mixers import compare_mixer


class ConformanceError(AssertionError):
    """An implementation that differs from the reference."""


@dataclass(frozen=True)
class Check:
    """One implementation on one case, dtype and device; call it to run it.

    case: None for kinds without a battery, where the check is that the target imports.
    """

    impl: Impl
    case: Case | str | None
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        name = self.case.name if isinstance(self.case, Case) else self.case or "imports"
        return f"{self.impl.name}-{name}-{str(self.dtype).removeprefix('torch.')}-{self.device}"

    def __call__(self) -> None:
        """Run the check; raises `ConformanceError` with what differs and by how much."""
        problems = list(self._problems())
        if problems:
            raise ConformanceError("\n".join([f"{self}:", *(f"  {line}" for line in problems)]))

    def _problems(self) -> Iterable[str]:
        target = self.impl.load()
        if isinstance(self.case, Case):
            reference = resolve("kernel", self.case.op, name="reference", dtype="float64").load()
            has_backward = "backward" in self.impl.features
            return compare_op(target, reference, self.case, self.dtype, self.device, has_backward)
        if isinstance(self.case, str):
            compare = compare_mixer if self.impl.kind == "depth_mixer" else compare_layer
            return compare(target, self.impl, self.case, self.dtype, self.device)
        return [] if callable(target) else [f"{self.impl.target} is {target!r}, not callable"]


def checks_of(impl: Impl) -> list[Check]:
    """Every check that applies here to an implementation: its cases, dtypes and devices."""
    if unmet_requirement(impl):
        return []
    if impl.kind == "kernel":
        cases: list[Any] = [c for c in op_cases(impl.implements) if c.features <= impl.features]
    elif impl.kind in LAYER_CASES:
        cases = list(LAYER_CASES[impl.kind])
    elif impl.kind == "depth_mixer":
        cases = ["reads"]
    else:
        return [Check(impl, None, torch.float32, "cpu")]
    checks = [
        Check(impl, case, dtype, device)
        for case in cases
        for dtype in ALL_DTYPES
        for device in _devices()
        if not isinstance(case, Case) or dtype in case.dtypes
    ]
    return [check for check in checks if _can_run(check)]


def check_impl(kind: str, implements: str, name: str) -> int:
    """Run every check of one implementation and return their number.

    name: full name or variant. Raises `ConformanceError` for the first check that fails and
    `K3Error` when there is nothing to check here.
    """
    impl = resolve_by_name(kind, implements, name)
    checks = checks_of(impl)
    if not checks:
        raise K3Error(
            f"{kind} {impl.name} has no check on this machine (devices {sorted(impl.devices)}, "
            f"dtypes {sorted(impl.dtypes)}, requires {impl.requires}); run it where it can run"
        )
    for check in checks:
        check()
    return len(checks)


def resolve_by_name(kind: str, implements: str, name: str) -> Impl:
    """The declared implementation of this name, whether or not it can run here."""
    impls = ensure_plugins().impls(kind, implements)
    for impl in impls:
        if impl.name in (name, f"{implements}.{name}"):
            return impl
    names = ", ".join(impl.name for impl in impls) or "none"
    raise K3Error(f"no {kind} for {implements} is called {name!r}; there are: {names}")


def conformance_params(kind: str | None = None, implements: str | None = None) -> list[Any]:
    """pytest parameters, one `Check` each, for all registered implementations of a kind."""
    # Imported here: the battery itself needs no pytest.
    import pytest

    checks = [c for i in ensure_plugins().impls(kind, implements) for c in checks_of(i)]
    marks = {"cpu": (), "cuda": (pytest.mark.gpu,)}
    return [pytest.param(check, id=str(check), marks=marks[check.device]) for check in checks]


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _can_run(check: Check) -> bool:
    request = Request(
        kind=check.impl.kind,
        implements=check.impl.implements,
        device=check.device,
        dtype=str(check.dtype).removeprefix("torch."),
        capability=device_capability(check.device),
    )
    # A reference in float64 is what the others are compared with.
    is_own_oracle = check.impl.is_reference and check.dtype == torch.float64
    return not is_own_oracle and not reason_against(check.impl, request)
