"""`environment.json`: what a run ran on, for whoever repeats it."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from k3_core.plugins import Resolution

_DISTRIBUTIONS = ("k3-core", "k3-train", "torch", "numpy", "safetensors", "triton")


def write_environment(
    path: Path, device: torch.device, resolutions: Mapping[str, Resolution]
) -> None:
    """Write versions, machine, command line and the implementations that were chosen."""
    report: dict[str, Any] = {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": versions(),
        "implementations": {name: one.chosen.name for name, one in sorted(resolutions.items())},
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str | None]:
    """What is installed of what a run depends on; None for what is not."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
