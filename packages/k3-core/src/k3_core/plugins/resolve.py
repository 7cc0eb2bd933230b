"""Choose one implementation for a request, once, when a thing is built.

Order: argument, environment, `[impl]` table, the hook `k3_select`, then automatic: of those that
can run the highest priority. A named implementation that cannot run is an error, and so is a tie.
Source: design 3 (registry).
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from k3_core.errors import ImplUnavailable, PluginError, nearest
from k3_core.plugins.filters import device_capability, reason_against
from k3_core.plugins.overrides import env_variable, find, named_by_config, named_by_environ
from k3_core.plugins.processes import ensure_plugins
from k3_core.plugins.registry import Registry
from k3_core.plugins.types import KINDS, Impl, Request, Resolution


def resolve(
    kind: str,
    implements: str,
    *,
    name: str | None = None,
    device: object = "cpu",
    dtype: object = "float32",
    features: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
    capability: tuple[int, int] | None = None,
    registry: Registry | None = None,
) -> Resolution:
    """The implementation of `implements` to use, with the reason for each one not chosen.

    device, dtype: strings or torch objects. overrides: the `[impl]` table of a config.
    capability: compute capability, read from the device when left out.
    Raises `ImplUnavailable` when nothing can run, a named one cannot, or the best are tied.
    """
    registry = ensure_plugins() if registry is None else registry
    request = Request(
        kind=kind,
        implements=implements,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        features=frozenset(features),
        capability=capability or device_capability(str(device)),
    )
    candidates = _candidates(registry, request)
    reasons = {impl.name: reason_against(impl, request) for impl in candidates}
    able = [impl for impl in candidates if not reasons[impl.name]]
    named = _named(request, registry.impls(), name, overrides)
    if named:
        source, origin, wanted = named
        chosen = find(wanted, request, candidates)
        if chosen is None or chosen not in able:
            problem = "does not exist" if chosen is None else "cannot run"
            raise _unavailable(
                f"{wanted!r} (by {origin}) {problem}", request, candidates, reasons, source
            )
    else:
        source, chosen = _choose(registry, request, candidates, able, reasons)
    return Resolution(
        request=request,
        chosen=chosen,
        source=source,
        rejected=tuple(
            (impl, reasons[impl.name] or _not_chosen(impl, chosen, source))
            for impl in candidates
            if impl is not chosen
        ),
    )


def _candidates(registry: Registry, request: Request) -> list[Impl]:
    candidates = registry.impls(request.kind, request.implements)
    if candidates:
        return candidates
    if request.kind not in KINDS:
        raise ImplUnavailable(
            f"unknown kind {request.kind!r}{_hint(request.kind, KINDS)}; one of {', '.join(KINDS)}"
        )
    names = sorted({impl.implements for impl in registry.impls(request.kind)})
    raise ImplUnavailable(
        f"no plugin declares the {request.kind} {request.implements!r}"
        f"{_hint(request.implements, names)}; there are: {', '.join(names) or 'none'}. "
        f"Run `k3 plugins list` to see what is loaded."
    )


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def _named(
    request: Request, impls: list[Impl], name: str | None, overrides: Mapping[str, Any] | None
) -> tuple[str, str, str] | None:
    """(source, origin for messages, name) of the first of argument, environment and config."""
    # The config is read first so that a wrong key in it is reported whatever wins.
    by_config = named_by_config(request, impls, overrides or {})
    by_environ = named_by_environ(request, impls, os.environ)
    if name is not None:
        return "argument", "argument", name
    if by_environ:
        return "env", *by_environ
    return ("config", f"[impl] {by_config[0]}", by_config[1]) if by_config else None


def _choose(
    registry: Registry,
    request: Request,
    candidates: list[Impl],
    able: list[Impl],
    reasons: Mapping[str, str],
) -> tuple[str, Impl]:
    if not able:
        raise _unavailable("nothing can run", request, candidates, reasons)
    selected = registry.select(request, tuple(able))
    if selected is not None:
        if selected not in able:
            raise PluginError(f"k3_select returned {selected!r}, which is not a candidate")
        return "select", selected
    top = max(impl.priority for impl in able)
    best = [impl for impl in able if impl.priority == top]
    if len(best) > 1:
        names = " and ".join(impl.name for impl in best)
        raise _unavailable(f"{names} tie at priority {top}", request, candidates, reasons)
    is_strict = os.environ.get("K3_STRICT_IMPL", "0") not in ("", "0")
    if is_strict and best[0].is_reference and request.device.startswith("cuda"):
        message = f"only {best[0].name} can run and K3_STRICT_IMPL forbids a reference on CUDA"
        raise _unavailable(message, request, candidates, reasons)
    return "auto", best[0]


def _not_chosen(impl: Impl, chosen: Impl, source: str) -> str:
    if source == "auto":
        return f"priority {impl.priority}, below {chosen.priority} of {chosen.name}"
    return f"could run; {chosen.name} was chosen by {source}"


def _unavailable(
    problem: str,
    request: Request,
    candidates: list[Impl],
    reasons: Mapping[str, str],
    source: str = "auto",
) -> ImplUnavailable:
    width = max(len(impl.name) for impl in candidates)
    rows = [
        f"  {impl.name:<{width}}  priority {impl.priority:>3}  {reasons[impl.name] or 'can run'}"
        for impl in candidates
    ]
    wanted = ", ".join([request.device, request.dtype, *sorted(request.features)])
    return ImplUnavailable(
        f"{request.kind} {request.implements} for {wanted}: {problem}.\nCandidates:\n"
        + "\n".join(rows)
        + f"\nTry: {_suggestion(request, candidates, reasons, source)}"
    )


def _suggestion(
    request: Request, candidates: list[Impl], reasons: Mapping[str, str], source: str
) -> str:
    """One command: name one that can run, else install what is missing, else look again."""
    able = [impl for impl in candidates if not reasons[impl.name]]
    if able and source != "argument":  # an argument wins over the variable
        best = max(able, key=lambda impl: impl.priority)
        return f"export {env_variable(request.kind, request.implements)}={best.name}"
    for impl in candidates:
        if reasons[impl.name].startswith("requires "):
            return f"pip install {' '.join(repr(text) for text in impl.requires)}"
    return f"k3 plugins impls --kind {request.kind}"
