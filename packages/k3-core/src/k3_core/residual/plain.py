"""Ordinary pre-norm residual stream: `attn_res_block_size = None` (architecture 1)."""

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.ops import OpSet
from k3_core.residual.base import DepthState, Site


class Residual:
    """Every sublayer reads the sum of all outputs before it."""

    has_sites = False

    def __init__(self, config: TextConfig, ops: OpSet) -> None:
        del config, ops

    def start(self, embedding_TD: Tensor) -> DepthState:
        """The stream starts as the embedding."""
        return DepthState(embedding_TD)

    def read_attention(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """The stream itself."""
        return _stream(state)

    def read_mlp(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """The stream itself."""
        return _stream(state)

    def write(self, state: DepthState, output_TD: Tensor) -> None:
        """stream += output."""
        state.replace(_stream(state) + output_TD)

    def read_output(self, state: DepthState, site: Site | None) -> Tensor:
        """The stream itself."""
        return _stream(state)


def _stream(state: DepthState) -> Tensor:
    assert state.prefix is not None
    return state.prefix
