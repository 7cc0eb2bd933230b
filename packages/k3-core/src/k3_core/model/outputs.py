"""What a forward pass returns, and the recorder of its intermediates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes


@dataclass(frozen=True)
class PackedOutput:
    """Result of a packed forward pass over T tokens, D model width."""

    logits: Tensor | None
    """float32 [T, vocabulary], or the asked rows of it."""
    hidden_TD: Tensor
    """After the final norm: what the output head reads. With `is_cut` only of the asked rows."""
    mix_TD: Tensor
    """Before the final norm: what the MTP layer reads; of the same rows."""
    hidden_states: dict[str, Tensor] | None = None
    """Intermediates by name, packed; see `Recorder`."""


@dataclass(frozen=True)
class K3Output:
    """Result of the [B, T] front; T is the expanded length when there are images."""

    logits: Tensor
    """float32 [B, T, vocabulary]; finite but meaningless where the mask is 0."""
    attention_mask: Tensor
    """int64 [B, T], 1 at real tokens."""
    hidden_states: dict[str, Tensor] | None = None
    """Intermediates by name, [B, T, ...] (routing: [tokens, k] as the router saw them); those of
    `Recorder` and `attention_mask`."""


class Recorder:
    """Collects intermediates under their names when asked to; costs nothing otherwise.

    Names: `inputs_embeds`; for each layer i `layers.i.attn_mix`, `attn_out`, `mlp_mix`,
    `mlp_out`, `prefix_sum`, `topk_idx` (ascending) and `topk_weight`; `output_mix`,
    `final_norm`, `logits`.
    """

    def __init__(self, is_active: bool) -> None:
        self.values: dict[str, Tensor] | None = {} if is_active else None

    @property
    def is_active(self) -> bool:
        """Whether anything is kept."""
        return self.values is not None

    def add(self, name: str, value: Tensor | None) -> None:
        """Keep a tensor under `name`."""
        if self.values is not None and value is not None:
            self.values[name] = value

    def add_routes(self, layer: int, routes: Routes | None) -> None:
        """Keep a layer's routes, experts in ascending order."""
        if self.values is None or routes is None:
            return
        idx_Tk, order = routes.idx_Tk.sort(dim=-1)
        self.add(f"layers.{layer}.topk_idx", idx_Tk)
        self.add(f"layers.{layer}.topk_weight", torch.gather(routes.weight_Tk, -1, order))
