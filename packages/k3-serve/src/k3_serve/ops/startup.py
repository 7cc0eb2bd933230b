"""What is looked at before a model is loaded, and what a start-up says (issue: operation)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3_core.checkpoint.folder import CheckpointFolder
from k3_core.checkpoint.headers import TensorEntry
from k3_core.errors import K3Error
from k3_core.plugins import Resolution

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PACKED, SCALE = ".weight_packed", ".weight_scale"
VALUES_PER_BYTE = 2  # MXFP4: two values of four bits
GIB = 2**30
TRAINING_OPS = ("kda_segment", "linear_cross_entropy", "mx_quantize", "newton_schulz")


def set_threads(wanted: int) -> None:
    """Has torch compute on so many threads; 0 leaves one core to the threads of the API, for which
    products on all cores would wait at every call."""
    import torch

    torch.set_num_threads(wanted or max(1, torch.get_num_threads() - 1))


def weight_bytes(entries: Iterable[TensorEntry], dtype: str, experts: str) -> int:
    """Bytes of the loaded weights: `dtype` values, packed experts as stored or decoded."""
    total, item = 0, ITEM_BYTES[dtype]
    for entry in entries:
        size = math.prod(entry.shape)
        if not entry.name.endswith((PACKED, SCALE)):
            total += size * item
        elif experts == "packed":
            total += entry.num_bytes
        elif entry.name.endswith(PACKED):
            total += size * VALUES_PER_BYTE * item
    return total


def check_memory(folder: CheckpointFolder, *, device: str, dtype: str, experts: str) -> str:
    """One line about the memory; K3Error when the weights alone do not fit.

    A dtype that loading refuses is left to loading; so is memory that cannot be known.
    """
    chosen = dtype_name(folder, dtype)
    if chosen not in ITEM_BYTES:
        return f"memory: not checked for dtype {chosen}"
    need = weight_bytes(folder.entries.values(), chosen, experts)
    have = available_bytes(device)
    if have is None:
        return f"memory: weights take {need / GIB:.2f} GiB; what {device} has is not known"
    if need > have:
        raise K3Error(
            f"the weights take {need / GIB:.2f} GiB and {device} has {have / GIB:.2f} GiB free; "
            "free some, choose a smaller --dtype or --experts packed, or another --device"
        )
    return f"memory: weights take {need / GIB:.2f} GiB of {have / GIB:.2f} GiB free on {device}"


def dtype_name(folder: CheckpointFolder, dtype: str) -> str:
    """The dtype that "auto" stands for, or the one that was named."""
    return str(folder.config.dtype) if dtype == "auto" else dtype


def available_bytes(device: str) -> int | None:
    """Free memory of a device in bytes; None when it cannot be known."""
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            return None  # loading says what is wrong with the device
        return int(torch.cuda.mem_get_info(device)[0])
    if device != "cpu":
        return None
    known = [size for size in (_free_of_machine(), _free_of_group()) if size is not None]
    return min(known, default=None)


def _free_of_machine(file: Path = Path("/proc/meminfo")) -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _free_of_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take: its limit less its use, but for droppable file pages."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" is a ValueError: no limit
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return None


def explain(resolutions: dict[str, Resolution]) -> Iterator[str]:
    """One line an op of inference: what runs, who chose it and why the others do not."""
    shown = {name: found for name, found in resolutions.items() if name not in TRAINING_OPS}
    width = max(map(len, shown), default=0)
    for name, found in sorted(shown.items()):
        others = "; ".join(f"{impl.name}: {reason}" for impl, reason in found.rejected)
        yield f"{name:<{width}}  {found.chosen.name} by {found.source}" + (
            f"  (not {others})" if others else ""
        )
