"""The parameterised layers, several linears as one product, and two parts of a layer at once."""

from k3_core.modules.beside import beside
from k3_core.modules.joined import Projections, Stacked, join
from k3_core.modules.linear import Linear
from k3_core.modules.norm import RMSNorm

__all__ = ["Linear", "Projections", "RMSNorm", "Stacked", "beside", "join"]
