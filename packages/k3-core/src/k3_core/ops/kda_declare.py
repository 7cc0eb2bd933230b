"""Declarations of the KDA ops (kda_chunk, kda_step, kda_segment, short_conv); imports no torch."""

from k3_core.plugins.types import Impl

_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
_VARLEN = frozenset({"backward", "varlen", "state_in", "state_out"})
# Kernels that anchor tiles at the bound of the gate cannot compute the softplus gate.
_UNBOUNDED = frozenset({"unbounded_gate"})
_CHUNK = _VARLEN | _UNBOUNDED
_SEGMENT = frozenset({"backward", "varlen"}) | _UNBOUNDED
_STEP = frozenset({"multi_token", "num_commit", "padded_rows"}) | _UNBOUNDED


def _impl(op: str, variant: str, features: frozenset[str], summary: str, priority: int) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.{variant}",
        target=f"k3_core.ops.{op}.{variant}:{op}",
        implements=op,
        dtypes=_FLOATS,
        features=features,
        priority=priority,
        summary=summary,
    )


IMPLS = [
    _impl("kda_chunk", "reference", _CHUNK, "token by token, the executable definition", 0),
    _impl("kda_chunk", "cpu", _CHUNK, "chunk form in plain torch, closed-form backward", 10),
    _impl("kda_step", "reference", _STEP, "vectorised over rows, pooled states in place", 0),
    _impl("kda_segment", "reference", _SEGMENT, "on the token-by-token recurrence", 0),
    _impl("kda_segment", "cpu", _SEGMENT, "on the chunk form", 10),
    _impl("short_conv", "reference", _VARLEN, "one sequence at a time", 0),
    _impl("short_conv", "cpu", _VARLEN, "shifted multiply-adds over all sequences at once", 10),
]
