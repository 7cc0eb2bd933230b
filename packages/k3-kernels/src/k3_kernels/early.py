"""Kernels that start while the one before them still runs (programmatic dependent launch).

A decode step is hundreds of kernels of 2 to 4 us, each of which waits until the one before it has
left the device and then takes about as long to start as to run. Started early, a kernel is on its
multiprocessor, with the weights that it reads first, when its inputs are ready.

The rule for a kernel that takes `IS_EARLY`: `wait_for_inputs` comes before the first access to
anything that an earlier kernel of the stream may write or still read, and before the first return
of a program; only weights are read before. A kernel is done when all of its programs are, so what
any earlier kernel wrote is there after the wait. Kernels that know nothing of this wait as ever.

Only in inference mode and outside of autocast, where no kernel in front of one of these writes
weights: a cast of one is such a kernel.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

MAX_ROWS = 128
"""With more rows a kernel takes longer than its start."""


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels of this device can wait for one another: capability 9.0, triton 3.6."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return version >= (3, 6) and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(num_rows: int, device: torch.device) -> dict[str, bool]:
    """The arguments of a launch for so many rows of a batch: the kernel's, and the launcher's."""
    is_wanted = num_rows <= MAX_ROWS and torch.is_inference_mode_enabled()
    if not is_wanted or torch.is_autocast_enabled(device.type) or not starts_early(device):
        return {"IS_EARLY": False}
    return {"IS_EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Wait until all kernels before this one are done; the next one may start and wait for this."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
