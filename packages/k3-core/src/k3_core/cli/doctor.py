"""Import everything that the plugins declare and report what does not import."""

import traceback
from dataclasses import asdict, dataclass, field

from k3_core.cli.lazy import CommandRegistry
from k3_core.plugins import API_VERSION, Impl, PluginState, Registry
from k3_core.plugins.filters import unmet_requirement


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not load: what, a one-line error, the traceback."""

    what: str
    error: str
    traceback: str


@dataclass(slots=True)
class Report:
    """Outcome of an examination. `skipped`: targets not imported, with the reason."""

    num_imported: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """The report as JSON values."""
        return asdict(self)


def examine(registry: Registry) -> Report:
    """Import every target and every command; a target whose requirements are unmet is skipped."""
    report = Report()
    commands = CommandRegistry.collect(registry).all()
    for record in registry.records:
        if record.state not in (PluginState.OK, PluginState.BLOCKED):
            problem = Problem(f"plugin {record.name}", record.error, record.traceback)
            report.problems.append(problem)
    loaders = {f"command {command.name}": command.load for command in commands}
    for impl in registry.impls():
        label = f"{impl.kind} {impl.name}"
        if reason := _reason_to_skip(impl):
            report.skipped[label] = reason
        else:
            loaders[label] = impl.load
    for label, load in loaders.items():
        try:
            load()
            report.num_imported += 1
        except (Exception, SystemExit) as error:
            report.problems.append(Problem(label, str(error), traceback.format_exc()))
    return report


def _reason_to_skip(impl: Impl) -> str:
    if impl.api != API_VERSION:
        return f"written for plugin contract {impl.api}"
    return unmet_requirement(impl)
