"""Declarations of the loops that numba compiles; imports neither torch nor numba. Source: design 5.

They serve a few tokens on a CPU and leave the rest to `<op>.cpu`, over which they go.
"""

from k3_core.ops.declare import FEATURES
from k3_core.plugins import Impl


def _loops(op: str, summary: str) -> Impl:
    return Impl(
        kind="kernel",
        name=f"{op}.numba",
        implements=op,
        target=f"k3_kernels.{op}.loops:{op}",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "float64"}),
        features=FEATURES[op] | {"graph_safe"},
        requires=("numba>=0.61",),
        priority=15,
        summary=summary,
    )


IMPLS = [
    _loops("linear", "a few rows share the reads of a weight"),
    _loops("attn_res", "scores and mix in one loop over the sources"),
    _loops("depth_read", "sum, mix and norm in one loop"),
    _loops("kda_chunk", "token by token, a head's state in the cache"),
    _loops("kda_decode", "one loop from the projections to the norm"),
    _loops("kda_replay", "accepted tokens one by one, in one loop"),
    _loops("rms_norm", "one loop for a few tokens"),
    _loops("short_conv", "taps and SiLU of a token in one loop"),
    _loops("situ_glu", "one loop for a few values"),
    _loops("latent_router", "both products of a few tokens in one call"),
    _loops("route_topk", "scores, choice and weights of a few tokens in one call"),
    _loops("moe_experts", "plain experts of a few rows in one call"),
    _loops("mla_decode", "attention of a few rows in one call"),
    _loops("gated_mla_decode", "the loops of its parts"),
]
