"""Declarations of the KDA kernels (kda_chunk, kda_segment, kda_step); imports no torch."""

from k3_core.plugins import Impl

_STEP = frozenset({"multi_token", "num_commit", "padded_rows", "graph_safe"})
_STATES = frozenset({"backward", "varlen", "state_in", "state_out", "graph_safe"})


def _impl(op: str, features: frozenset[str], summary: str) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.triton",
        target=f"k3_kernels.{op}.op:{op}",
        implements=op,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        min_capability=(8, 0),
        features=features,
        requires=("triton>=3.6",),
        priority=20,
        summary=summary,
    )


IMPLS = [
    _impl("kda_chunk", _STATES, "parallel prep and a scan split over values and segments"),
    _impl("kda_segment", frozenset({"backward", "varlen", "graph_safe"}), "the same scan, seeded"),
    _impl("kda_step", _STEP, "gate, norms and recurrence in one kernel"),
]
