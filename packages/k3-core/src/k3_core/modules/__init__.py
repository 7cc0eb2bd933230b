"""The two parameterised layers that everything is made of: a bias-free linear and an RMSNorm."""

from k3_core.modules.linear import Linear
from k3_core.modules.norm import RMSNorm

__all__ = ["Linear", "RMSNorm"]
