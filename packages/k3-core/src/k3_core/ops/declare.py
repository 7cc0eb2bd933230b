"""Declarations of the op implementations that k3-core brings; imports no torch."""

from k3_core.ops.kda_declare import IMPLS as KDA_IMPLS
from k3_core.plugins.types import Impl

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
BACKWARD = frozenset({"backward"})


def _impl(op: str, variant: str, **fields: object) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.{variant}",
        implements=op,
        target=f"k3_core.ops.{op}.{variant}:{op}",
        **{"dtypes": FLOATS, **fields},  # type: ignore[arg-type]
    )


def implementations() -> list[Impl]:
    """All kernel implementations of k3-core."""
    references = [
        _impl(op, "reference", features=features, summary="slow and exact, the executable spec")
        for op, features in (
            ("gated_rms_norm", BACKWARD),
            ("attn_res", BACKWARD),
            ("situ_glu", BACKWARD),
            ("route_topk", BACKWARD),
            ("moe_experts", BACKWARD | {"mxfp4"}),
            ("mla_prefill", BACKWARD | {"varlen", "return_max"}),
            ("mla_decode", frozenset({"paged"})),
            ("mx_quantize", frozenset()),
            ("newton_schulz", frozenset()),
            ("linear_cross_entropy", BACKWARD),
        )
    ]
    cuda = frozenset({"cuda"})
    faster = [
        _impl(
            "moe_experts",
            "cpu",
            priority=10,
            features=BACKWARD | {"mxfp4"},
            summary="rows sorted by expert, one matmul per expert",
        ),
        _impl(
            "moe_experts",
            "cuda",
            devices=cuda,
            dtypes=frozenset({"bfloat16"}),
            min_capability=(8, 0),
            priority=20,
            features=BACKWARD | {"mxfp4"},
            summary="torch grouped matmul in bfloat16",
        ),
        _impl(
            "mla_prefill",
            "cpu",
            priority=10,
            features=BACKWARD | {"varlen", "return_max"},
            summary="torch scaled_dot_product_attention per sequence",
        ),
        _impl(
            "mla_prefill",
            "cuda",
            devices=cuda,
            dtypes=frozenset({"bfloat16", "float16"}),
            min_capability=(8, 0),
            priority=20,
            features=BACKWARD | {"varlen", "return_max"},
            summary="torch variable-length flash attention",
        ),
    ]
    return [*KDA_IMPLS, *references, *faster]
