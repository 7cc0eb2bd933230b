"""Declarations of the implementations in plain torch; imports no torch. Source: design 5.

`<op>.cpu` is differentiable where the reference is, and but for MLA's decoding runs on any device;
`<op>.cuda` uses operators that torch has for CUDA only. The ops that are missing here are left to
their reference, than which no other form of torch calls measured faster (`k3 kernels bench`).
"""

from k3_core.ops.declare import FEATURES, FLOATS
from k3_core.plugins import Impl


def _cpu(op: str, summary: str, devices: frozenset[str] = frozenset({"cpu", "cuda"})) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.cpu",
        implements=op,
        target=f"k3_kernels.{op}.cpu:{op}",
        devices=devices,
        dtypes=FLOATS,
        features=FEATURES[op],
        priority=10,
        summary=summary,
    )


def _cuda(op: str, dtypes: frozenset[str], summary: str) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.cuda",
        implements=op,
        target=f"k3_kernels.{op}.torch_cuda:{op}",
        devices=frozenset({"cuda"}),
        dtypes=dtypes,
        min_capability=(8, 0),
        features=FEATURES[op],
        priority=20,
        summary=summary,
    )


IMPLS = [
    _cpu("kda_chunk", "chunk form in plain torch, closed-form backward"),
    _cpu("kda_segment", "on the chunk form"),
    _cpu("kda_step", "reads of k and q in one product, states in place"),
    _cpu("kda_decode", "convolution, step and norm, each in its own form"),
    _cpu("short_conv", "shifted multiply-adds over all sequences at once"),
    _cpu("kda_replay", "accepted tokens of all rows in one product"),
    _cpu("attn_res", "the mix in place, closed-form backward"),
    _cpu("rms_norm", "in place when no gradient is needed"),
    _cpu("gated_rms_norm", "in place when no gradient is needed"),
    _cpu("situ_glu", "in place when no gradient is needed"),
    _cpu("depth_read", "sum, mix and norm, each in its own form"),
    _cpu("moe_experts", "rows sorted by expert, one matmul per expert"),
    _cpu("mla_prefill", "torch scaled_dot_product_attention per sequence"),
    # It reads the lengths on the host, for which a GPU would have to be waited for.
    _cpu("mla_decode", "one sequence at a time, only its tokens read", devices=frozenset({"cpu"})),
    _cpu("gated_mla_decode", "each part in its own form", devices=frozenset({"cpu"})),
    _cpu("mx_quantize", "float32, codes found in the bits"),
    _cpu("linear_cross_entropy", "chunks of tokens, gradients in the forward"),
    _cpu("newton_schulz", "Gram form of long matrices"),
    _cuda(
        "latent_router",
        frozenset({"bfloat16", "float16"}),
        "16-bit products, the sums of the router's kept",
    ),
    _cuda("moe_experts", frozenset({"bfloat16"}), "torch grouped matmul in bfloat16"),
    _cuda(
        "mla_prefill",
        frozenset({"bfloat16", "float16"}),
        "torch variable-length flash attention",
    ),
]
