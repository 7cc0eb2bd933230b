"""Declarations of the implementations in plain torch; imports no torch. Source: design 5.

`<op>.cpu` runs on any device and is differentiable where the reference is; `<op>.cuda` uses
operators that torch has for CUDA only. Ops without one here are left to their reference, which
already is the batched form.
"""

from k3_core.ops.declare import FEATURES, FLOATS
from k3_core.plugins import Impl


def _cpu(op: str, summary: str) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.cpu",
        implements=op,
        target=f"k3_kernels.{op}.cpu:{op}",
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
    _cpu("short_conv", "shifted multiply-adds over all sequences at once"),
    _cpu("moe_experts", "rows sorted by expert, one matmul per expert"),
    _cpu("mla_prefill", "torch scaled_dot_product_attention per sequence"),
    _cuda("moe_experts", frozenset({"bfloat16"}), "torch grouped matmul in bfloat16"),
    _cuda(
        "mla_prefill",
        frozenset({"bfloat16", "float16"}),
        "torch variable-length flash attention",
    ),
]
