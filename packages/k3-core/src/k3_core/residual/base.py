"""What the decoder asks of a depth mixer.

A mixer owns no parameters. The decoder holds, for each place that reads the depth (attention and
MLP of each layer, and the output), a `Site` with the learned norm and pseudo-query, if the mixer
uses them. T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.ops import OpSet


@dataclass
class DepthState:
    """What has been written so far, for one forward pass."""

    prefix: Tensor | None
    """Running sum of the current block [T, D]; None right after a block was closed."""
    sources: list[Tensor] = field(default_factory=list)
    """Finished sources [T, D], in order of depth."""


@dataclass(frozen=True)
class Site:
    """The learned part of one read: key norm [D] and pseudo-query [1, D]."""

    norm: nn.Module
    proj: nn.Module


class DepthMixer(Protocol):
    """Reads h for a sublayer, writes its output back."""

    has_sites: bool
    """Whether the reads are learned, so that layers carry `*_res_norm` and `*_res_proj`."""

    def __init__(self, config: TextConfig, ops: OpSet) -> None: ...

    def start(self, embedding_TD: Tensor) -> DepthState:
        """State before layer 0."""
        ...

    def read_attention(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Input of a layer's attention [T, D], before its norm."""
        ...

    def read_mlp(self, state: DepthState, layer: int, site: Site | None) -> Tensor:
        """Input of a layer's feed-forward [T, D], before its norm."""
        ...

    def write(self, state: DepthState, output_TD: Tensor) -> None:
        """Add a sublayer's output."""
        ...

    def read_output(self, state: DepthState, site: Site | None) -> Tensor:
        """What enters the final norm [T, D]."""
        ...
