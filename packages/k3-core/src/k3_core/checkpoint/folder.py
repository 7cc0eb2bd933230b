"""A checkpoint folder: config.json and one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from k3_core.config import K3Config
from k3_core.config.quantization import released_quantization

from .headers import CheckpointError, Header, TensorEntry, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
A_LOG_KEY = "a_log_length"


@dataclass(frozen=True)
class CheckpointFolder:
    """Headers of all weight files of a folder, and the configuration as stored.

    config: that of config.json with what only the weights show: the stored length of A_log, and
    whether the routed experts are packed (names decide, not the quantisation section).
    """

    path: Path
    config: K3Config
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, path: str | Path) -> CheckpointFolder:
        """Read every header; raises ConfigError or CheckpointError naming what is wrong."""
        folder = Path(path)
        config = K3Config.from_file(folder)
        headers = _read_shards(folder) if (folder / INDEX).is_file() else [_read_single(folder)]
        entries: dict[str, TensorEntry] = {}
        for header in headers:
            entries.update(header.entries)
        config = _as_stored(config, entries)
        _check_metadata(config, headers, folder)
        return cls(folder, config, entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())


def _read_single(folder: Path) -> Header:
    file = folder / WEIGHTS
    if not file.is_file():
        others = sorted(one.name for one in folder.iterdir() if one.suffix in (".bin", ".pt"))
        hint = f"; {others} are pickles, which are never read: convert them" if others else ""
        raise CheckpointError(
            f"{folder} has neither {INDEX} nor {WEIGHTS}{hint}. Give a folder that holds one"
        )
    return read_header(file)


def _read_shards(folder: Path) -> list[Header]:
    weight_map = _read_index(folder / INDEX)
    headers = {}
    for name in sorted(set(weight_map.values())):
        file = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{INDEX} in {folder} names {name!r}, not a plain file name")
        if not file.is_file():
            held = [tensor for tensor, one in weight_map.items() if one == name]
            raise CheckpointError(
                f"shard {name} is missing in {folder}; it holds {_listed(held)}. Download it again"
            )
        headers[name] = read_header(file)
    for tensor, name in weight_map.items():
        if tensor not in headers[name].entries:
            raise CheckpointError(
                f"tensor {tensor} is missing in {folder / name}, where {INDEX} says it is. "
                "Download the shard and the index again"
            )
    for name, header in headers.items():
        if extra := [one for one in header.entries if weight_map.get(one) != name]:
            raise CheckpointError(
                f"{folder / name} holds {_listed(extra)} that {INDEX} does not place there. "
                "Download the shard and the index again"
            )
    return list(headers.values())


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(one, str) for one in weight_map.values()):
            return dict(weight_map)
        problem = "weight_map does not map names to files"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CheckpointError(f"{file} is not an index ({problem}). Download it again")


def _as_stored(config: K3Config, entries: Mapping[str, TensorEntry]) -> K3Config:
    heads = config.text.linear_attn_config.num_heads
    is_packed = any(name.endswith(".weight_packed") for name in entries)
    section = config.text.quantization_config
    if is_packed != config.is_quantized:
        section = released_quantization() if is_packed else None
    length = None
    a_log = next((one for name, one in entries.items() if name.endswith(".A_log")), None)
    if a_log is not None and len(a_log.shape) == 1 and a_log.shape != (heads,):
        (length,) = a_log.shape
        if length < heads:
            raise CheckpointError(
                f"tensor {a_log.name} in {a_log.file} has {length} values, allowed: at least the "
                f"{heads} heads of config.json. Correct num_heads"
            )
    text = replace(config.text, a_log_length=length, quantization_config=section)
    return replace(config, text=text)


def _check_metadata(config: K3Config, headers: Iterable[Header], folder: Path) -> None:
    length = config.text.a_log_length or config.text.linear_attn_config.num_heads
    for header in headers:
        if (stated := header.metadata.get(A_LOG_KEY)) not in (None, str(length)):
            raise CheckpointError(
                f"metadata of {folder} says {A_LOG_KEY} = {stated}, A_log has {length} values. "
                "The weights were edited: export them again"
            )


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
