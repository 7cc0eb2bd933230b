"""Block Attention Residuals, exactly as released (report 3.1, architecture 3.4).

Layers are grouped in blocks; a finished block's sum is one source. The prefix adds sublayer
outputs only: neither the embedding (except as the first source) nor a mix is ever added to it.
"""

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.ops import OpSet
from k3_core.residual.base import DepthState, Site


class BlockAttentionResidual:
    """Softmax over the finished blocks and the running one."""

    has_sites = True

    def __init__(self, config: TextConfig, ops: OpSet) -> None:
        assert config.attn_res_block_size is not None
        self.block_size = config.attn_res_block_size
        self.eps = config.rms_norm_eps
        self.ops = ops

    def start(self, embedding_TD: Tensor) -> DepthState:
        """The embedding is the running sum until layer 0 closes it."""
        return DepthState(embedding_TD)

    def read_attention(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix, then close the block when `layer` begins a new one."""
        assert state.prefix is not None
        h_TD = self._mix(state, site) if state.sources else state.prefix
        if layer % self.block_size == 0:
            state.sources.append(state.prefix)
            state.prefix = None
        return h_TD

    def read_mlp(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix of the blocks and the running sum, which holds at least this layer's attention."""
        return self._mix(state, site)

    def write(self, state: DepthState, output_TD: Tensor) -> None:
        """Add to the running block sum."""
        state.prefix = output_TD if state.prefix is None else state.prefix + output_TD

    def read_output(self, state: DepthState, site: Site | None) -> Tensor:
        """Mix before the final norm."""
        return self._mix(state, site)

    def _mix(self, state: DepthState, site: Site | None) -> Tensor:
        assert site is not None and state.prefix is not None
        return self.ops.attn_res(
            [*state.sources, state.prefix], site.norm.weight, site.proj.weight, eps=self.eps
        )
