"""What every Triton kernel here declares; imports no torch. Source: design 3, 5.

The kernels pass all of their tests on an H200 and are measured there (docs/kernels.md), which is
why they ask for its compute capability: their tiles fill its shared memory.
"""

from k3_core.plugins import Impl

PRIORITY = 30
"""Above torch's own operators for CUDA, which have 20."""


def triton_impl(op: str, features: frozenset[str], summary: str) -> Impl:
    """The Triton implementation of an op, `k3_kernels.<op>.op:<op>`."""
    return Impl(
        kind="kernel",
        name=f"{op}.triton",
        target=f"k3_kernels.{op}.op:{op}",
        implements=op,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        min_capability=(9, 0),
        features=features,
        requires=("triton>=3.6",),
        priority=PRIORITY,
        summary=summary,
    )
