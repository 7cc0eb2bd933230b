"""Configuration: the released config.json, presets, TOML files and `--set` (design 7, 9).

Imported on first use: the registry reads `k3_core.config.declare` at every start of `k3`.
"""

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from .counts import ParameterCounts, count_parameters
    from .errors import ConfigError
    from .manifest import TensorSpec, tensor_manifest
    from .model import K3Config
    from .overrides import apply_overrides
    from .text import LinearAttnConfig, TextConfig
    from .toml import load_config, load_dataclass, read_toml
    from .vision import VisionConfig
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            name: f"{__name__}.{module}"
            for module, names in {
                "counts": ("ParameterCounts", "count_parameters"),
                "errors": ("ConfigError",),
                "manifest": ("TensorSpec", "tensor_manifest"),
                "model": ("K3Config",),
                "overrides": ("apply_overrides",),
                "text": ("LinearAttnConfig", "TextConfig"),
                "toml": ("load_config", "load_dataclass", "read_toml"),
                "vision": ("VisionConfig",),
            }.items()
            for name in names
        },
    )

__all__ = [
    "ConfigError",
    "K3Config",
    "LinearAttnConfig",
    "ParameterCounts",
    "TensorSpec",
    "TextConfig",
    "VisionConfig",
    "apply_overrides",
    "count_parameters",
    "load_config",
    "load_dataclass",
    "read_toml",
    "tensor_manifest",
]
