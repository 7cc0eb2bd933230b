"""Write a model as a checkpoint folder in the released layout (architecture 2).

The bytes depend on the model alone, so that loading and saving again changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_core.config import K3Config
from k3_core.config.manifest import DTYPE_CODES, is_float32_kept
from k3_core.config.quantization import released_quantization

from .folder import A_LOG_KEY, CONFIG
from .headers import CheckpointError
from .load import TEXT_PREFIX
from .writer import Staging, StoredTensor, remove_stale, write_weights

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration

GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "tokenizer.json")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_pretrained(
    model: K3ForConditionalGeneration,
    directory: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files.

    Tensors get the dtype they were loaded from, else that of config.json (float32 for the set
    that the release keeps so). Packed experts stay packed; dequantised ones are written as plain
    `.weight` and config.json then has no quantisation section: call `model.pack_experts()` before
    for MXFP4. Without a tokenizer the files of the folder that the model came from are copied.
    max_shard_size: bytes, or text such as "5GB", "500MB", "1GiB".
    """
    limit = parse_size(max_shard_size)
    config = config_as_saved(model)
    stored = _stored_tensors(model, config)
    source = model.tokenizer_source
    length = config.text.a_log_length or config.text.linear_attn_config.num_heads
    with Staging(Path(directory)) as staging:
        kept = write_weights(staging, stored, limit, {"format": "pt", A_LOG_KEY: str(length)})
        staging.write_json(CONFIG, config.to_dict())
        if not staging.copy(source, GENERATION):
            staging.write_json(GENERATION, generation_config(config))
        if tokenizer is None:
            for name in TOKENIZER_FILES:
                staging.copy(source, name)
    remove_stale(Path(directory), kept)
    if tokenizer is not None:
        tokenizer.save_pretrained(Path(directory))


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000, "5GB", "500 MB" or "1GiB"; raises CheckpointError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise CheckpointError(
            f"max_shard_size = {size!r} is not accepted, allowed: bytes above 0, or a number with "
            f"one of {', '.join(filter(None, _UNITS))}"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def config_as_saved(model: K3ForConditionalGeneration) -> K3Config:
    """The model's configuration with the quantisation section that its experts call for."""
    config: K3Config = model.config
    packed = {bank.is_packed for bank in model.expert_banks()}
    if len(packed) > 1:
        raise CheckpointError(
            "some expert banks are packed and others are not; call model.pack_experts(), or "
            "dequantize every bank"
        )
    if packed == {config.is_quantized} or not packed:
        return config
    section = None if config.is_quantized else released_quantization()
    return replace(config, text=replace(config.text, quantization_config=section))


def generation_config(config: K3Config) -> dict[str, object]:
    """Generation defaults of the report 6.1.3 (architecture 9)."""
    return {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def _stored_tensors(model: K3ForConditionalGeneration, config: K3Config) -> list[StoredTensor]:
    default = DTYPE_CODES[config.dtype]
    stored = []
    for full_name, tensor in model.state_dict().items():
        name = full_name.removeprefix(TEXT_PREFIX) if config.is_flat else full_name
        shape = tuple(tensor.shape)
        if name.endswith((".weight_packed", ".weight_scale")):
            dtype = "U8"
        else:
            dtype = model.stored_dtypes.get(name, "F32" if is_float32_kept(name) else default)
        if name.endswith(".A_log"):
            shape = (config.text.a_log_length or len(tensor),)
        stored.append(StoredTensor(name, tensor, shape, dtype))
    return stored
