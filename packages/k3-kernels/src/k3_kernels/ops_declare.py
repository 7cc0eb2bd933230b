"""Declarations of the kernels beside KDA; imports no torch."""

from k3_core.plugins import Impl

_GRAPH = frozenset({"backward", "graph_safe"})


def _impl(op: str, features: frozenset[str], summary: str, **fields: object) -> Impl:
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
        priority=30,
        summary=summary,
        **fields,  # type: ignore[arg-type]
    )


# "backward": calls that need gradients are given to k3-core's differentiable implementation.
IMPLS = [
    _impl(
        "short_conv",
        _GRAPH | {"varlen", "state_in", "state_out"},
        "packed sequences, lengths found on the device",
    ),
    _impl("gated_rms_norm", _GRAPH, "one pass, strided inputs"),
    _impl("situ_glu", _GRAPH, "one pass, halves of one matrix in place"),
    _impl("attn_res", _GRAPH, "every source read once, online softmax over the depth"),
    _impl("route_topk", _GRAPH, "ties by lowest expert id, NaN never chosen first"),
    _impl("moe_experts", _GRAPH | {"mxfp4"}, "grouped products, MXFP4 unpacked in registers"),
    _impl(
        "mla_prefill",
        _GRAPH | {"varlen", "return_max"},
        "flash attention over packed sequences, float32 output on request",
    ),
    _impl(
        "mla_decode",
        frozenset({"paged", "graph_safe"}),
        "absorbed, split over the context",
    ),
    _impl("mx_quantize", frozenset(), "the codes and scales of the reference, bit for bit"),
]
