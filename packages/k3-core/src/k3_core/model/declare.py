"""Declarations of the model parts that k3-core brings; imports no torch."""

from k3_core.plugins.types import Impl

_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})

_PARTS = (
    ("attention", "kda", "kda.default", "attention.kda:KimiDeltaAttention"),
    ("attention", "gated_mla", "gated_mla.default", "attention.mla:GatedMLA"),
    ("moe", "dense_mlp", "dense_mlp.default", "moe.dense:DenseFeedForward"),
    ("moe", "latent_moe", "latent_moe.default", "moe.latent:LatentMoE"),
    ("depth_mixer", "residual", "residual.default", "residual.plain:Residual"),
    (
        "depth_mixer",
        "block_attn_res",
        "block_attn_res.default",
        "residual.block:BlockAttentionResidual",
    ),
    (
        "depth_mixer",
        "full_attn_res",
        "full_attn_res.default",
        "residual.full:FullAttentionResidual",
    ),
    ("cache", "contiguous", "contiguous.default", "cache.contiguous:ContiguousCache"),
)


def implementations() -> list[Impl]:
    """Attention layers, feed-forwards, depth mixers and caches of k3-core."""
    return [
        Impl(
            kind=kind,
            name=name,
            implements=implements,
            target=f"k3_core.{target}",
            dtypes=_FLOATS,
            features=frozenset({"backward"} if kind != "cache" else ()),
            summary="as released" if kind != "cache" else "one growing buffer a layer",
        )
        for kind, implements, name, target in _PARTS
    ]
