"""fla.utils as far as its users' and its own tests need it: the device and error ratios."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

device = "cuda" if torch.cuda.is_available() else "cpu"
device_torch_lib = getattr(torch, device)

IS_AMD = device == "cuda" and torch.version.hip is not None
IS_NVIDIA = device == "cuda" and not IS_AMD
_GENERATION = torch.cuda.get_device_capability()[0] if IS_NVIDIA else 0
IS_NVIDIA_HOPPER = _GENERATION == 9
IS_NVIDIA_BLACKWELL = _GENERATION >= 10
IS_INTEL = IS_INTEL_ALCHEMIST = IS_NPU = False
device_platform = "nvidia" if IS_NVIDIA else "amd" if IS_AMD else "cpu"

# fla's cache of tuned configurations; K3's block sizes come from tables.
FLA_CACHE_MODE = SimpleNamespace(value="disabled", uses_default_config=lambda: False)


def get_abs_err(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference."""
    return (x.detach() - y.detach()).abs().max().item()


def get_err_ratio(x: Tensor, y: Tensor) -> float:
    """RMS of the difference over the RMS of `x`."""
    error = (x.detach() - y.detach()).double().square().mean().sqrt()
    return (error / (x.detach().double().square().mean().sqrt() + 1e-8)).item()


def assert_close(
    prefix: str,
    ref: Tensor,
    tri: Tensor,
    ratio: float,
    warning: bool = False,
    err_atol: float = 1e-6,
) -> None:
    """Raise unless `tri` is within `ratio` of `ref` by RMS, or within `err_atol` everywhere.

    With `warning` a miss is only warned about; NaN is an error in any case.
    """
    worst, found = get_abs_err(ref, tri), get_err_ratio(ref, tri)
    if worst <= err_atol:
        return
    for name, tensor in (("ref", ref), ("tri", tri)):
        if torch.isnan(tensor).any():
            raise AssertionError(f"{prefix.strip()}: {name} holds NaN")
    if found < ratio:
        return
    message = f"{prefix.strip()}: error ratio {found:.6f} is not below {ratio} (worst {worst:.6f})"
    if not warning:
        raise AssertionError(message)
    warnings.warn(message, stacklevel=2)
