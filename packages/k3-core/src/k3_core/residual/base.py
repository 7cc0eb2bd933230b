"""What the decoder asks of a depth mixer.

A mixer owns no parameters. The decoder holds, for each place that reads the depth (attention and
MLP of each layer, and the output), a `Site` with the learned norm and pseudo-query, if the mixer
uses them. T tokens, R of them, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.ops import OpSet


class DepthState:
    """What has been written so far, for one forward pass.

    `sources` are finished [T, D], in order of depth. An output may wait to join the running sum,
    so that the op that reads the sum next can add it on the way.
    """

    def __init__(self, prefix: Tensor | None, sources: Sequence[Tensor] = ()) -> None:
        self.sources = list(sources)
        self._prefix = prefix
        self._waiting: Tensor | None = None

    @property
    def prefix(self) -> Tensor | None:
        """Running sum of the current block [T, D]; None right after a block was closed."""
        if self._waiting is not None and self._prefix is not None:
            self._prefix, self._waiting = self._prefix + self._waiting, None
        return self._prefix

    def replace(self, prefix: Tensor | None) -> None:
        """Another running sum, or none: a method, since a compiled graph of torch 2.11 passes the
        setter of a property by."""
        self._prefix, self._waiting = prefix, None

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """The running sum and the output that waits to join it, None without one."""
        return self._prefix, self._waiting

    def keep(self, rows_R: Tensor) -> None:
        """Only these tokens go on."""
        self.sources = [source_TD[rows_R] for source_TD in self.sources]
        if self._prefix is not None:
            self._prefix = self._prefix[rows_R]
        if self._waiting is not None:
            self._waiting = self._waiting[rows_R]

    def add(self, output_TD: Tensor) -> None:
        """An output joins the running sum, or begins it."""
        if self.prefix is None:
            self.replace(output_TD)
        else:
            self._waiting = output_TD


@dataclass(frozen=True)
class Site:
    """The learned part of one read: key norm [D] and pseudo-query [1, D]."""

    norm: nn.Module
    proj: nn.Module


class DepthMixer(Protocol):
    """Reads h for a sublayer, writes its output back.

    A mixer may also have `read_normed(state, layer, site, norm, is_mlp)`: the `norm` (an RMSNorm)
    of what `read_attention` or `read_mlp` gives, which then takes their place where nobody looks
    at h itself.
    """

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
