"""Declarations of the kernels beside KDA; imports no torch."""

from k3_kernels.declare import triton_impl

_GRAPH = frozenset({"backward", "graph_safe"})


# "backward": where an op has no backward kernels, calls that need gradients are given to a
# differentiable implementation in torch.
IMPLS = [
    triton_impl("linear", _GRAPH, "few rows in one step, weights asked for ahead of the inputs"),
    triton_impl(
        "short_conv",
        _GRAPH | {"varlen", "state_in", "state_out"},
        "packed sequences, lengths found on the device",
    ),
    triton_impl("rms_norm", _GRAPH, "one pass, a row a program"),
    triton_impl("gated_rms_norm", _GRAPH, "one pass, strided inputs"),
    triton_impl("situ_glu", _GRAPH, "one pass, halves of one matrix in place"),
    triton_impl("attn_res", _GRAPH, "every source read once, online softmax over the depth"),
    triton_impl("depth_read", _GRAPH, "sum, mix and norm in one pass"),
    triton_impl("latent_router", _GRAPH, "one product for both, float32 sums kept for the router"),
    triton_impl("route_topk", _GRAPH, "ties by lowest expert id, NaN never chosen first"),
    triton_impl(
        "moe_experts",
        _GRAPH | {"mxfp4", "mxfp4_training"},
        "grouped products, MXFP4 unpacked in registers",
    ),
    triton_impl(
        "mla_prefill",
        _GRAPH | {"varlen", "return_max"},
        "flash attention over packed sequences, float32 output on request",
    ),
    triton_impl(
        "mla_decode",
        frozenset({"paged", "graph_safe"}),
        "absorbed, split over the context",
    ),
    triton_impl(
        "gated_mla_decode",
        frozenset({"paged", "graph_safe"}),
        "queries and new rows, attention, values: a launch each",
    ),
    triton_impl(
        "linear_cross_entropy", _GRAPH, "chunks of tokens, gradients in place of their logits"
    ),
    triton_impl(
        "newton_schulz",
        frozenset({"graph_safe"}),
        "symmetric products of half the blocks, Gram form of small long matrices",
    ),
    triton_impl("mx_quantize", frozenset(), "the codes and scales of the reference, bit for bit"),
]
