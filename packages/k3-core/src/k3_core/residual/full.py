"""Full Attention Residuals: every sublayer output is a source of its own (report 3.1)."""

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.ops import OpSet
from k3_core.ops.math import in_autocast
from k3_core.residual.base import DepthState, Site


class FullAttentionResidual:
    """Softmax over the embedding and all sublayer outputs so far."""

    has_sites = True

    def __init__(self, config: TextConfig, ops: OpSet) -> None:
        self.eps = config.rms_norm_eps
        self.ops = ops

    def start(self, embedding_TD: Tensor) -> DepthState:
        """The embedding is the first source, in the dtype of those that layers write."""
        embedding_TD = in_autocast(embedding_TD)
        return DepthState(embedding_TD, [embedding_TD])

    def read_attention(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix of all sources; the first layer reads the embedding alone."""
        return self._mix(state, site)

    def read_mlp(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Mix of all sources."""
        return self._mix(state, site)

    def write(self, state: DepthState, output_TD: Tensor) -> None:
        """A new source; the prefix is the latest one."""
        state.sources.append(output_TD)
        state.replace(output_TD)

    def read_output(self, state: DepthState, site: Site | None) -> Tensor:
        """Mix before the final norm."""
        return self._mix(state, site)

    def _mix(self, state: DepthState, site: Site | None) -> Tensor:
        assert site is not None
        if len(state.sources) == 1:
            return state.sources[0]
        return self.ops.attn_res(state.sources, site.norm.weight, site.proj.weight, eps=self.eps)
