"""The ops of K3: one folder each, with its signature and its reference.

`OpSet` is how model code reaches them: every op is resolved once, when a model is built, and
the callables are kept, so that no registry call happens per layer or per token (design 3, 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from k3_core.plugins import Resolution, resolve

OP_NAMES = (
    "linear",
    "kda_chunk",
    "kda_step",
    "kda_decode",
    "kda_replay",
    "kda_segment",
    "short_conv",
    "rms_norm",
    "gated_rms_norm",
    "attn_res",
    "depth_read",
    "situ_glu",
    "latent_router",
    "route_topk",
    "moe_experts",
    "mla_prefill",
    "mla_decode",
    "gated_mla_decode",
    "mx_quantize",
    "newton_schulz",
    "linear_cross_entropy",
)


class OpSet:
    """The resolved callables of all ops, as attributes named like the ops."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], resolutions: Mapping) -> None:
        self.resolutions: dict[str, Resolution] = dict(resolutions)
        for name, function in functions.items():
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {name!r}; the ops are {', '.join(OP_NAMES)}")

    @classmethod
    def resolve(
        cls,
        device: str = "cpu",
        dtype: str = "float32",
        overrides: Mapping[str, str] | None = None,
    ) -> OpSet:
        """Choose an implementation of every op for a device type and a dtype name.

        `overrides` is an `[impl]` table: keys are `kernel` or `kernel.<op>`, values names of
        implementations or of variants. Raises `ImplUnavailable` when a named one cannot run.
        """
        resolutions = {
            name: resolve("kernel", name, device=device, dtype=dtype, overrides=overrides)
            for name in OP_NAMES
        }
        functions = {name: resolution.load() for name, resolution in resolutions.items()}
        return cls(functions, resolutions)
