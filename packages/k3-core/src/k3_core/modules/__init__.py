"""The parameterised layers that everything is made of, and several linears as one product."""

from k3_core.modules.joined import join, project, stack
from k3_core.modules.linear import Linear
from k3_core.modules.norm import RMSNorm

__all__ = ["Linear", "RMSNorm", "join", "project", "stack"]
