"""Block Attention Residuals, exactly as released (report 3.1, architecture 3.4).

Layers are grouped in blocks; a finished block's sum is one source. The prefix adds sublayer
outputs only: neither the embedding (except as the first source) nor a mix is ever added to it.
"""

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.modules import RMSNorm
from k3_core.ops import OpSet
from k3_core.ops.math import in_autocast
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
        """The embedding is the running sum until layer 0 closes it.

        Every later read has it as a source beside what layers wrote, and so in their dtype.
        """
        return DepthState(in_autocast(embedding_TD))

    def read_attention(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix, then close the block when `layer` begins a new one."""
        assert state.prefix is not None
        h_TD = self._mix(state, site) if state.sources else state.prefix
        self._close(state, layer)
        return h_TD

    def _close(self, state: DepthState, layer: int) -> None:
        """The running sum becomes a source where `layer` begins a block."""
        if layer % self.block_size == 0:
            assert state.prefix is not None
            state.sources.append(state.prefix)
            state.replace(None)

    def read_mlp(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix of the blocks and the running sum, which holds at least this layer's attention."""
        return self._mix(state, site)

    def read_normed(
        self, state: DepthState, layer: int, site: Site, norm: RMSNorm, is_mlp: bool
    ) -> Tensor:
        """The norm of what `read_attention` or `read_mlp` gives, by one op with the sum."""
        if not state.sources:
            return norm(self.read_attention(state, layer, site))
        prefix, waiting = state.parts
        assert prefix is not None
        x_TD, sum_TD = self.ops.depth_read(
            state.sources,
            prefix,
            waiting,
            site.norm.weight,
            site.proj.weight,
            norm.weight,
            eps=self.eps,
            out_eps=norm.eps,
        )
        state.replace(sum_TD)
        if not is_mlp:
            self._close(state, layer)
        return x_TD

    def write(self, state: DepthState, output_TD: Tensor) -> None:
        """Add to the running block sum."""
        state.add(output_TD)

    def read_output(self, state: DepthState, site: Site | None) -> Tensor:
        """Mix before the final norm."""
        return self._mix(state, site)

    def _mix(self, state: DepthState, site: Site | None) -> Tensor:
        assert site is not None and state.prefix is not None
        return self.ops.attn_res(
            [*state.sources, state.prefix], site.norm.weight, site.proj.weight, eps=self.eps
        )
