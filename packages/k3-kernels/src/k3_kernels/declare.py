"""What every Triton kernel here declares; imports no torch. Source: design 3, 5.

The kernels are tested by Triton's interpreter and were measured on an H200 one by one; until all of
their tests have passed there together, each is used only where it is named.
"""

from k3_core.plugins import Impl

BY_NAME_ONLY = -10
"""Below every implementation of k3-core, whose references have 0."""


def triton_impl(op: str, features: frozenset[str], summary: str) -> Impl:
    """The Triton implementation of an op, `k3_kernels.<op>.op:<op>`."""
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
        priority=BY_NAME_ONLY,
        summary=f"{summary}; by name only",
    )
