"""Implementations of ops as nodes of a graph: what torch.compile sees of them (design 3, issue 5).

`custom_op` makes an implementation a custom op of torch. Run plainly it costs one look at a flag
more; in a trace it is one node with a schema, a fake implementation and a backward, and whatever it
does inside (kernels, loops, reads on the host) is not looked at. Implementations in plain torch
that read nothing on the host trace by themselves and need none of this.

What an op's implementations share is in `k3_core.ops.<op>.meta`: a function `meta` with the op's
signature that returns its results as empty tensors. Its annotations give the schema (`arguments`).
"""

from k3_core.custom_op.arguments import Written
from k3_core.custom_op.decorator import custom_op
from k3_core.custom_op.implementation import Gradients, Needs

__all__ = ["Gradients", "Needs", "Written", "custom_op"]
