"""Which plugin implements each part of a model, resolved once when it is built (design 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3_core.config import TextConfig
from k3_core.ops import OpSet
from k3_core.plugins import Resolution, resolve


class Parts:
    """The resolved classes and ops of one model, with the reasons."""

    def __init__(self, device: str, dtype: str, overrides: Mapping[str, str] | None = None) -> None:
        self.ops = OpSet.resolve(device, dtype, overrides)
        self.resolutions: dict[str, Resolution] = {
            f"kernel.{name}": resolution for name, resolution in self.ops.resolutions.items()
        }
        self._target: dict[str, Any] = {"device": device, "dtype": dtype, "overrides": overrides}

    def get(self, kind: str, implements: str) -> Any:
        """The class that implements a part."""
        key = f"{kind}.{implements}"
        if key not in self.resolutions:
            self.resolutions[key] = resolve(kind, implements, **self._target)
        return self.resolutions[key].load()

    def depth_mixer(self, config: TextConfig) -> Any:
        """The configured depth mixer, built."""
        if config.attn_res_block_size is None:
            name = "residual"
        else:
            name = "full_attn_res" if config.attn_res_type == "full" else "block_attn_res"
        return self.get("depth_mixer", name)(config, self.ops)
