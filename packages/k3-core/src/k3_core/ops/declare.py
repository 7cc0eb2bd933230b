"""Declarations of the references, and what a complete implementation of an op can do.

Imports no torch. The faster implementations are in k3-kernels, the first of them in plain torch.
"""

from k3_core.plugins.types import Impl

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})

_BACKWARD = frozenset({"backward"})
_VARLEN = _BACKWARD | {"varlen"}
_STATES = _VARLEN | {"state_in", "state_out"}
# Kernels that anchor tiles at the bound of the gate cannot compute the softplus gate.
_UNBOUNDED = frozenset({"unbounded_gate"})

FEATURES: dict[str, frozenset[str]] = {
    # Torch's own product, which a graph can hold.
    "linear": _BACKWARD | {"graph_safe"},
    "kda_chunk": _STATES | _UNBOUNDED | {"grouped_heads", "checkpoints"},
    "kda_step": _UNBOUNDED | {"multi_token", "num_commit", "padded_rows", "records"},
    "kda_decode": _UNBOUNDED | {"multi_token", "padded_rows", "records"},
    "kda_replay": _UNBOUNDED | {"padded_rows", "conv_window"},
    "kda_segment": _VARLEN | _UNBOUNDED,
    "short_conv": _STATES,
    "rms_norm": _BACKWARD,
    "gated_rms_norm": _BACKWARD,
    "attn_res": _BACKWARD,
    "depth_read": _BACKWARD,
    "situ_glu": _BACKWARD,
    "latent_router": _BACKWARD,
    "route_topk": _BACKWARD,
    "moe_experts": _BACKWARD | {"mxfp4", "mxfp4_training"},
    "mla_prefill": _VARLEN | {"return_max"},
    "mla_decode": frozenset({"paged"}),
    "gated_mla_decode": frozenset({"paged"}),
    "mx_quantize": frozenset(),
    "newton_schulz": frozenset(),
    "linear_cross_entropy": _BACKWARD,
}
"""Every feature of each op; the references have them all."""


def implementations() -> list[Impl]:
    """The references of all ops: slow and exact, the executable specification."""
    return [
        Impl(
            kind="kernel",
            name=f"{op}.reference",
            implements=op,
            target=f"k3_core.ops.{op}.reference:{op}",
            dtypes=FLOATS,
            features=features,
            summary="slow and exact, the executable specification",
        )
        for op, features in FEATURES.items()
    ]
