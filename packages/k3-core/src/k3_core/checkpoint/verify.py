"""Compare the tensors of a folder with those that its configuration calls for; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3_core.config import TensorSpec, tensor_manifest

from .folder import CheckpointFolder
from .headers import CheckpointError, TensorEntry

FLOATS = {"BF16", "F16", "F32"}
_SHOWN = 5
_STEPS = {
    "missing": "Download the files again, or correct config.json",
    "extra": "config.json describes another model: correct it, or remove the tensor",
    "shape": "config.json describes another model: correct it",
    "dtype": "Export the tensor again in the stated dtype",
}


@dataclass(frozen=True)
class Difference:
    """kind: missing, extra, shape or dtype; `detail` says where and what was expected."""

    kind: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} tensor {self.name}: {self.detail}"


def find_differences(folder: CheckpointFolder, *, is_exact: bool) -> list[Difference]:
    """Differences between files and configuration.

    is_exact: dtypes must be the released ones; otherwise any of BF16, F16 and F32 may stand for
    another, which loading converts.
    """
    found = []
    num_known = 0
    for spec in tensor_manifest(folder.config):
        entry = folder.entries.get(spec.name)
        if entry is None:
            found.append(Difference("missing", spec.name, f"no file of {folder.path} holds it"))
        else:
            num_known += 1
            found.extend(_compare(spec, entry, is_exact))
    if num_known < len(folder.entries):
        known = {spec.name for spec in tensor_manifest(folder.config)}
        extra = [one for name, one in folder.entries.items() if name not in known]
        found += [Difference("extra", one.name, f"in {one.file}") for one in extra]
    return found


def check_folder(folder: CheckpointFolder) -> None:
    """Raise CheckpointError when the files cannot be loaded for the configuration."""
    found = find_differences(folder, is_exact=False)
    if not found:
        return
    shown = "\n  ".join(str(one) for one in found[:_SHOWN])
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    steps = ". ".join(_STEPS[kind] for kind in dict.fromkeys(one.kind for one in found[:_SHOWN]))
    raise CheckpointError(
        f"{folder.path} does not fit its config.json ({len(found)} differences):"
        f"\n  {shown}{more}\n{steps}. `k3 inspect {folder.path}` lists all"
    )


def _compare(spec: TensorSpec, entry: TensorEntry, is_exact: bool) -> Iterable[Difference]:
    if entry.shape != spec.shape:
        detail = f"{entry.shape} in {entry.file}, expected {spec.shape}"
        yield Difference("shape", spec.name, detail)
    is_same = entry.dtype == spec.dtype or (not is_exact and {entry.dtype, spec.dtype} <= FLOATS)
    if not is_same:
        detail = f"{entry.dtype} in {entry.file}, expected {spec.dtype}"
        yield Difference("dtype", spec.name, detail)
