"""Configuration: the released config.json, presets, TOML files and `--set` (design 7, 9)."""

from .counts import ParameterCounts, count_parameters
from .errors import ConfigError
from .manifest import TensorSpec, tensor_manifest
from .model import K3Config
from .overrides import apply_overrides
from .text import LinearAttnConfig, TextConfig
from .toml import load_config, load_dataclass, read_toml
from .vision import VisionConfig

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
