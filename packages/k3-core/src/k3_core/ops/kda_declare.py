"""Declarations of the KDA ops (kda_chunk, kda_step, kda_segment, short_conv); imports no torch."""

from k3_core.plugins.types import Impl

_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
_VARLEN = frozenset({"backward", "varlen", "state_in", "state_out"})


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
    _impl("kda_chunk", "reference", _VARLEN, "token by token, the executable definition", 0),
    _impl(
        "kda_step",
        "reference",
        frozenset({"multi_token", "num_commit", "padded_rows"}),
        "vectorised over rows, pooled states updated in place",
        0,
    ),
    _impl(
        "kda_segment",
        "reference",
        frozenset({"backward", "varlen"}),
        "affine map of a stretch, on the token-by-token recurrence",
        0,
    ),
    _impl("short_conv", "reference", _VARLEN, "one sequence at a time", 0),
]
