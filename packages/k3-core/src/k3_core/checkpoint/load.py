"""Load a checkpoint folder into a model, one tensor at a time (architecture 2).

The model is built without memory, the experts take the form they are stored or wanted in, then
each tensor is allocated once and filled from its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3_core.config import K3Config
from k3_core.config.manifest import tensor_manifest
from k3_core.quant import MXTensor, bad_scale

from .folder import CheckpointFolder
from .headers import CheckpointError, TensorEntry
from .source import resolve_source
from .tensors import TensorReader
from .verify import check_folder

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPERTS = ("packed", "dequantized")
TEXT_PREFIX = "language_model."


def load_pretrained(
    cls: type[K3ForConditionalGeneration],
    path_or_name: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    experts: str = "packed",
    impl_overrides: Mapping[str, str] | None = None,
) -> K3ForConditionalGeneration:
    """Build `cls` from a folder or a bundled name, in eval mode.

    dtype: a torch dtype, its name, or "auto" for that of config.json; tensors that the release
    keeps in float32 stay so. experts: "packed" keeps MXFP4 experts packed (experts stored
    unpacked stay unpacked), "dequantized" decodes them exactly into `dtype`.
    Raises ConfigError or CheckpointError; for all but the values (a tail of A_log, a NaN scale)
    before any memory is taken for weights.
    """
    if experts not in EXPERTS:
        raise CheckpointError(f"experts = {experts!r} is not accepted, allowed: {EXPERTS}")
    _check_device(device)
    source = resolve_source(path_or_name)
    folder = CheckpointFolder.open(source)
    check_folder(folder)
    chosen = _choose_dtype(dtype, folder.config)
    model = cls(
        folder.config,
        device="meta",
        ops_device=device,
        dtype=chosen,
        impl_overrides=impl_overrides,
    )
    if folder.config.is_quantized and experts == "packed":
        _pack_shapes(model)
    allocate(model, device)
    _fill(model, folder)
    model.stored_dtypes = _unusual_dtypes(folder)
    model.tokenizer_source = source
    return model.eval()


def _check_device(device: torch.device | str) -> None:
    """Raise CheckpointError for a device that this machine or this build of torch lacks."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(
            f"device {str(device)!r} is not usable ({problem}); try cpu"
        ) from error


def _choose_dtype(dtype: torch.dtype | str, config: K3Config) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    name = config.dtype if dtype == "auto" else dtype
    if name in DTYPES:
        return DTYPES[str(name)]
    allowed = ", ".join(["auto", *DTYPES])
    raise CheckpointError(f"dtype = {dtype!r} is not accepted, allowed: {allowed}")


def _pack_shapes(model: K3ForConditionalGeneration) -> None:
    """Give the expert banks packed stacks on the meta device."""
    for bank in model.expert_banks():
        bank.pack(_packed_like)


def _packed_like(weight: Tensor) -> MXTensor:
    *rows, columns = weight.shape
    sizes = (columns // 2, columns // 32)
    packed, scale = (weight.new_empty((*rows, size), dtype=torch.uint8) for size in sizes)
    return MXTensor(packed, scale)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Replace every meta parameter and buffer by uninitialised memory on `device`."""

    def real(tensor: Tensor) -> Tensor:
        # Not `empty_like`, which loads 30 MB of meta kernels.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(real(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = real(buffer)


def _fill(model: K3ForConditionalGeneration, folder: CheckpointFolder) -> None:
    """Read every tensor of the model, module by module: views of all at once would take memory."""
    prefix = TEXT_PREFIX if folder.config.is_flat else ""
    with TensorReader() as reader:
        for path, module in model.named_modules():
            views: dict[str, Tensor] = {}
            module._save_to_state_dict(views, f"{path}." if path else "", keep_vars=False)
            for name, view in views.items():
                _fill_one(reader, folder, name.removeprefix(prefix), view)


def _fill_one(reader: TensorReader, folder: CheckpointFolder, name: str, target: Tensor) -> None:
    entry = folder.entries.get(name)
    if entry is None:
        target.copy_(_decoded(reader, folder, name))
    elif name.endswith(".A_log"):
        target.copy_(_without_tail(entry, reader.read(entry), len(target)))
    else:
        reader.read_into(entry, target)
        if name.endswith(".weight_scale"):
            _check_scale(entry, target)


def _decoded(reader: TensorReader, folder: CheckpointFolder, name: str) -> Tensor:
    if f"{name}_packed" not in folder.entries:
        raise CheckpointError(f"the model has a tensor {name} that no file of {folder.path} holds")
    scale_entry = folder.entries[f"{name}_scale"]
    scale = reader.read(scale_entry)
    _check_scale(scale_entry, scale)
    return MXTensor(reader.read(folder.entries[f"{name}_packed"]), scale).dequantize()


def _without_tail(entry: TensorEntry, stored: Tensor, num_heads: int) -> Tensor:
    """A_log of the real heads; raises CheckpointError when more than zeros follow them."""
    if bool(stored[num_heads:].any()):
        raise CheckpointError(
            f"tensor {entry.name} in {entry.file} has {len(stored)} values for {num_heads} heads "
            f"and a tail that is not zero. A_log is per head: correct num_heads or export it again"
        )
    return stored[:num_heads]


def _check_scale(entry: TensorEntry, scale: Tensor) -> None:
    if problem := bad_scale(scale):
        raise CheckpointError(
            f"tensor {entry.name} in {entry.file}: {problem}. Export the weight again"
        )


def _unusual_dtypes(folder: CheckpointFolder) -> dict[str, str]:
    """Stored dtypes that differ from what the configuration implies; kept for saving."""
    return {
        spec.name: stored
        for spec in tensor_manifest(folder.config)
        if (stored := folder.entries[spec.name].dtype) != spec.dtype
    }
