"""What plugins declare and what the registry answers: data only, torch is never imported.

An `Impl` says that something exists and where; its target is imported when it is first used.
Source: design 3 (registry).
"""

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from k3_core.errors import ImplLoadError, PluginError
from k3_core.plugins.declaration import check_requirements, check_types

API_VERSION = 1
"""Version of the plugin contract that this core implements."""

KINDS = (
    "attention",
    "moe",
    "depth_mixer",
    "kernel",
    "cache",
    "optimizer",
    "balancer",
    "schedule",
    "dataset",
    "quality_classifier",
    "memory_policy",
    "trainer_event",
    "logger",
    "suite",
    "environment",
    "sandbox",
    "harness",
    "reward",
    "advantage",
    "policy_loss",
    "correction",
    "executor",
    "weight_channel",
    "preset",
)
"""Every kind of implementation; each has the hook `k3_register_<kind>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """A declaration: metadata of one implementation, and the import string of its target.

    name: unique inside its kind, by convention `<implements>.<variant>`.
    target: "module:attribute", imported on first use.
    implements: the op or interface that it serves; the part of the name before the first dot
      when it is left out.
    features: what it can do beyond the plain case ("backward", "varlen", "graph_safe", ...).
    requires: PEP 508 requirements ("triton>=3.6") checked against installed distributions.
    priority: used by the automatic choice only, where the highest wins and a tie is an error.
    api: the version of the plugin contract that the target was written for.
    """

    kind: str
    name: str
    target: str
    implements: str = ""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"float32"})
    min_capability: tuple[int, int] | None = None
    features: frozenset[str] = frozenset()
    requires: tuple[str, ...] = ()
    priority: int = 0
    api: int = 1
    summary: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind not in KINDS:
            raise PluginError(f"Impl {self.name!r}: unknown kind {self.kind!r}; one of {KINDS}")
        if not self.name:
            raise PluginError(f"Impl of kind {self.kind!r} for {self.target!r} has an empty name")
        module, _, attribute = self.target.partition(":")
        if not module or not attribute:
            raise PluginError(
                f"Impl {self.name!r}: target {self.target!r} is not of the form 'module:attribute'"
            )
        for name in ("devices", "dtypes", "features"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        object.__setattr__(self, "requires", tuple(self.requires))
        check_requirements(self)
        if not self.implements:
            object.__setattr__(self, "implements", self.name.partition(".")[0])

    @property
    def is_reference(self) -> bool:
        """Whether this is the slow and exact implementation that the others are compared with."""
        return self.name == f"{self.implements}.reference"

    def load(self) -> Any:
        """Import the target and return it; `ImplLoadError` names what is missing."""
        module_name, _, attribute = self.target.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                value = getattr(value, part)
        except (Exception, SystemExit) as error:
            raise ImplLoadError(
                f"{self.kind} {self.name}: target {self.target!r} does not import: "
                f"{type(error).__name__}: {error}. Run `k3 plugins doctor` for the traceback."
            ) from error
        return value

    def as_dict(self) -> dict[str, object]:
        """The fields as JSON values, sets sorted; what the hash of the table is made of."""
        values = asdict(self)
        return {
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in values.items()
        }


class PluginState(StrEnum):
    """What became of a plugin when it was loaded."""

    OK = "ok"
    BROKEN = "broken"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    DUPLICATE = "duplicate"


@dataclass(slots=True, kw_only=True)
class PluginRecord:
    """One discovered plugin. `error` is one line, `traceback` is kept for the doctor."""

    name: str
    distribution: str
    version: str
    source: str
    state: PluginState = PluginState.OK
    error: str = ""
    traceback: str = ""
    load_seconds: float = 0.0
    imports_torch: bool = False
    hooks: tuple[str, ...] = ()
    num_impls: int = 0

    def as_dict(self) -> dict[str, object]:
        """The record as JSON values, without the traceback."""
        values = asdict(self)
        del values["traceback"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller needs: an implementation of `implements` for a device, a dtype and features.

    capability: CUDA compute capability of the device, None when it is not known.
    """

    kind: str
    implements: str
    device: str = "cpu"
    dtype: str = "float32"
    features: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The chosen implementation, who chose it, and why each other candidate was not chosen.

    source: "argument", "env", "config", "select" (a plugin's policy) or "auto".
    """

    request: Request
    chosen: Impl
    source: str
    rejected: tuple[tuple[Impl, str], ...] = field(default=())

    def load(self) -> Any:
        """Import the target of the chosen implementation and return it."""
        return self.chosen.load()

    def as_dict(self) -> Mapping[str, object]:
        """The resolution as JSON values, for `k3 plugins why`, run logs and checkpoints."""
        return {
            "kind": self.request.kind,
            "implements": self.request.implements,
            "device": self.request.device,
            "dtype": self.request.dtype,
            "features": sorted(self.request.features),
            "chosen": self.chosen.name,
            "target": self.chosen.target,
            "source": self.source,
            "rejected": [{"name": impl.name, "reason": reason} for impl, reason in self.rejected],
        }
