"""What a table of figures has to say of the machine it was made on."""

from __future__ import annotations

import platform

import torch

from k3_kernels.tuning import triton_version


def describe(device: str) -> dict[str, object]:
    """Names and versions as JSON values."""
    is_cuda = device.startswith("cuda")
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": device,
        "name": torch.cuda.get_device_name(device) if is_cuda else cpu,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
