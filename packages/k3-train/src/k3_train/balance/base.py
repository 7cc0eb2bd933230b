"""The interface of a balancer. T tokens, L routers, E experts, k routes a token, B bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from k3_core.ops.route_topk import Routes
    from k3_train.config import BalanceSection


class Balancer(Protocol):
    """Sees the routes of every micro-batch and moves the biases once per optimizer step.

    Built as `target(biases, top_k=..., settings=...)` with one bias [E] per router, changed in
    place, and the settings of `[balance]`.
    One that has an attribute `histograms`, int32 [E, B] per router, gets the required biases of all
    training passes counted there by the op `route_topk`; the routers that can do so are not
    observed (`k3_core.ops.route_topk.histogram`). One that acts by gradient has a method
    `auxiliary(routes, is_counted_T)` that returns the routes with it (`Router.auxiliary`), and a
    0-dimensional tensor `share`, where it finds what the loss of the micro-batch weighs.
    """

    def __init__(
        self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection
    ) -> None: ...

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Account for one micro-batch of router number `router`. It must not wait for a GPU.

        is_counted_T: bool, False at tokens to leave out (padding); None counts all.
        """

    def update(self) -> None:
        """Derive the biases that the next step uses, and forget what was observed."""

    def forget(self) -> None:
        """Forget what was observed since the last update; the biases stay."""

    def state_tensors(self) -> dict[str, Tensor]:
        """What was observed since the last update, for a checkpoint between micro-batches."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""


def routers_of(model: nn.Module) -> list[Any]:
    """The routers in it, in order; by their biases, so that those of a plugin's MoE take part."""
    return [one for one in model.modules() if hasattr(one, "e_score_correction_bias")]
