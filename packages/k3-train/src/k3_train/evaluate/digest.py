"""Which weights a figure belongs to, as a digest."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from k3_core.errors import K3Error
from k3_train.file_hash import file_sha256


def files_digest(folder: Path) -> str:
    """Of all safetensors files of a model or checkpoint: SHA-256 over their names and SHA-256.

    Equal to `sha256sum` of what `sha256sum $(find . -name '*.safetensors' | cut -c3- | LC_ALL=C
    sort)` prints in the folder. K3Error when there is none.
    """
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
    if not files:
        raise K3Error(f"{folder} has no *.safetensors: give the folder of a model or checkpoint")
    total = hashlib.sha256()
    for name in files:
        total.update(f"{file_sha256(folder / name)}  {name}\n".encode())
    return f"files-sha256:{total.hexdigest()}"


@torch.no_grad()
def parameters_digest(model: nn.Module) -> str:
    """Of weights in memory, for a model that is in no file yet: SHA-256 over names and values."""
    total = hashlib.sha256()
    for name, param in sorted(model.named_parameters()):
        total.update(f"{name} {param.dtype} {tuple(param.shape)}\n".encode())
        total.update(param.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return f"parameters-sha256:{total.hexdigest()}"
