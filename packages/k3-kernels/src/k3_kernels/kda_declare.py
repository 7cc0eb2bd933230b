"""Declarations of the KDA kernels; imports no torch."""

from k3_kernels.declare import triton_impl

_STEP = frozenset({"multi_token", "num_commit", "padded_rows", "records", "graph_safe"})
_DECODE = frozenset({"multi_token", "padded_rows", "records", "graph_safe"})
_REPLAY = frozenset({"padded_rows", "conv_window", "graph_safe"})
_CHUNK = frozenset(
    {"backward", "varlen", "state_in", "state_out", "grouped_heads", "checkpoints", "graph_safe"}
)
_SEGMENT = frozenset({"backward", "varlen", "graph_safe"})

# Without "unbounded_gate": the softplus gate cannot be anchored in chunks of 32 tokens.
IMPLS = [
    triton_impl("kda_chunk", _CHUNK, "parallel prep and a scan split over values and segments"),
    triton_impl("kda_segment", _SEGMENT, "the same scan, seeded"),
    triton_impl("kda_step", _STEP, "gate, norms and recurrence in one kernel"),
    triton_impl("kda_decode", _DECODE, "convolution to gated norm in one kernel"),
    triton_impl("kda_replay", _REPLAY, "recorded writes applied to states and windows"),
]
