"""Why an implementation cannot serve a request: one reason per candidate, cheapest first.

Source: design 3 (registry). Nothing here imports torch; the compute capability is read from
torch only when the process has imported it already.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

from k3_core.plugins.types import API_VERSION, Impl, Request


def reason_against(impl: Impl, request: Request) -> str:
    """Why `impl` cannot serve `request`, or an empty string when it can."""
    checks = (_api, _device, _dtype, _features, _requires, _capability)
    return next((reason for check in checks if (reason := check(impl, request))), "")


def device_capability(device: str) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None when it is no such device or not known."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, of a first-party checkout, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        about = sys.modules.get(f"{distribution.replace('-', '_')}.__about__")
        return getattr(about, "__version__", None)


def unmet_requirement(impl: Impl) -> str:
    """The first requirement of `impl` that this environment does not meet, or an empty string."""
    if not impl.requires:
        return ""
    # Imported here because most implementations require nothing.
    from packaging.requirements import Requirement

    for text in impl.requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        found = installed_version(requirement.name)
        if found is None:
            return f"requires {text}, which is not installed"
        if not requirement.specifier.contains(found, prereleases=True):
            return f"requires {text}, found {found}"
    return ""


def _api(impl: Impl, request: Request) -> str:
    if impl.api == API_VERSION:
        return ""
    return f"is written for plugin contract {impl.api}, this core has {API_VERSION}"


def _device(impl: Impl, request: Request) -> str:
    device = request.device.partition(":")[0]
    if device in impl.devices:
        return ""
    return f"runs on {_names(impl.devices)}, not on {device}"


def _dtype(impl: Impl, request: Request) -> str:
    if request.dtype in impl.dtypes:
        return ""
    return f"takes {_names(impl.dtypes)}, not {request.dtype}"


def _features(impl: Impl, request: Request) -> str:
    missing = request.features - impl.features
    return f"lacks {_names(missing)}" if missing else ""


def _requires(impl: Impl, request: Request) -> str:
    return unmet_requirement(impl)


def _capability(impl: Impl, request: Request) -> str:
    if impl.min_capability is None or not request.device.startswith("cuda"):
        return ""
    need = ".".join(map(str, impl.min_capability))
    if request.capability is None:
        return f"needs compute capability {need}, that of {request.device} is not known"
    if request.capability < impl.min_capability:
        return f"needs compute capability {need}, has {'.'.join(map(str, request.capability))}"
    return ""


def _names(values: frozenset[str]) -> str:
    return ", ".join(sorted(values)) or "nothing"
