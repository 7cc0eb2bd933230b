"""The released `quantization_config`: MXFP4 routed experts (architecture 1 and 2.2)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .errors import bad_value

FORMAT = "mxfp4-pack-quantized"

_RELEASED: dict[str, object] = {
    "config_groups": {
        "group_0": {
            "format": FORMAT,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": FORMAT,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

_WEIGHTS = {"group_size": 32, "num_bits": 4, "type": "float", "symmetric": True}


def released_quantization() -> dict[str, object]:
    """A fresh copy of the released section."""
    return copy.deepcopy(_RELEASED)


def check_quantization(section: Mapping[str, object]) -> None:
    """Accept only the released scheme; raise ConfigError naming what differs.

    The `ignore` list is not read: which tensors are packed is seen from their names.
    """
    name = "quantization_config"
    if section.get("format") != FORMAT:
        step = "Remove the section, or convert the experts to MXFP4."
        raise bad_value(f"{name}.format", section.get("format"), repr(FORMAT), step)
    groups = section.get("config_groups", {})
    for key, group in _table(groups, f"{name}.config_groups").items():
        path = f"{name}.config_groups.{key}"
        group = _table(group, path)
        weights = _table(group.get("weights", {}), f"{path}.weights")
        for field, wanted in _WEIGHTS.items():
            if (value := weights.get(field, wanted)) != wanted:
                step = "Convert the experts to MXFP4."
                raise bad_value(f"{path}.weights.{field}", value, repr(wanted), step)
        if (activations := group.get("input_activations")) is not None:
            raise bad_value(f"{path}.input_activations", activations, "null")


def _table(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise bad_value(path, value, "a table of key-value pairs")
    return value
