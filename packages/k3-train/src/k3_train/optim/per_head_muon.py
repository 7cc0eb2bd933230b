"""Per-Head Muon: momentum orthogonalised block by block (report 5, training 3.4).

N stacked blocks, r rows, c columns. M <- mu M + G; the Nesterov input G + mu M is cut into
the blocks of each parameter's role; W <- W - lr (s O + lambda W), where s is `update_scale` of the
block's shape, not of the parameter's. Momentum is stored, never the update.

Large parameters, such as stacks of experts, are updated one after the other without a copy, so that
an update needs memory for one of them only; small ones go together, those of one block shape in one
iteration.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from k3_train.optim.roles import Role

UPDATE_RMS = 0.2
"""Root mean square of an update, matched to AdamW's (Moonlight, arXiv 2502.16982)."""

LARGE = 1 << 22
"""Elements from which a parameter is updated alone."""


def update_scale(rule: str, rows: int, columns: int) -> float:
    """What multiplies the orthogonal matrix O of a block [rows = outputs, columns = inputs].

    "match_rms_adamw": 0.2 sqrt(max(rows, columns)), which gives every block the root mean square
    0.2 (Moonlight; our reading for K3, whose report does not restate it). "original":
    sqrt(max(1, rows / columns)) (Muon as first published), for which rates are of another size.
    """
    if rule == "match_rms_adamw":
        return UPDATE_RMS * math.sqrt(max(rows, columns))
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    raise ValueError(f"Muon's scale {rule!r} is unknown; use 'match_rms_adamw' or 'original'")


class PerHeadMuon:
    """Muon over parameters with `Role.rule == "muon"`; blocks of one shape share one iteration.

    newton_schulz: the op, `[N, r, c] -> [N, r, c]`. dtype: what it works in, None for the
    parameters'. scale: a rule of `update_scale`. A parameter whose gradient is None is not
    touched; a zero gradient with zero momentum changes nothing but the decay.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        roles: Mapping[str, Role],
        *,
        newton_schulz: Callable[[Tensor], Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype | None = None,
        scale: str = "match_rms_adamw",
    ) -> None:
        self.params = dict(params)
        self.roles = roles
        self.newton_schulz = newton_schulz
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.dtype, self.scale = dtype, scale
        self.buffers = {name: torch.zeros_like(param) for name, param in self.params.items()}

    @torch.no_grad()
    def step(self, lr_factor: float) -> None:
        """One update with learning rate `lr * lr_factor`."""
        names = [name for name, param in self.params.items() if param.grad is not None]
        large = [name for name in names if self.params[name].numel() >= LARGE]
        small = [name for name in names if self.params[name].numel() < LARGE]
        for together in (*([name] for name in large), small):
            if together:
                self._update(together, self.lr * lr_factor)

    def _update(self, names: Sequence[str], lr: float) -> None:
        params: list[Tensor] = [self.params[name] for name in names]
        inputs = self._advance(params, [self.buffers[name] for name in names])
        torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        for scale, targets, blocks in self._groups(names, params, inputs):
            stacked_Nrc = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            updates = self.newton_schulz(stacked_Nrc).split([len(block) for block in blocks])
            torch._foreach_add_(targets, updates, alpha=-lr * scale)

    def _advance(self, params: list[Tensor], buffers: list[Tensor]) -> Sequence[Tensor]:
        """Move the momentum; the Nesterov inputs, written once in the dtype of the iteration."""
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, grads)
        if self.dtype in (None, params[0].dtype):
            return torch._foreach_add(grads, buffers, alpha=self.momentum)
        return [
            torch.add(
                grad, buffer, alpha=self.momentum, out=torch.empty_like(grad, dtype=self.dtype)
            )
            for grad, buffer in zip(grads, buffers, strict=True)
        ]

    def _groups(
        self, names: Sequence[str], params: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[tuple[float, list[Tensor], list[Tensor]]]:
        """Blocks of equal shape and scale together: (scale, views of the parameters, blocks)."""
        groups: dict[tuple[float, int, int], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, param, value in zip(names, params, inputs, strict=True):
            role = self.roles[name]
            for target, block in zip(role.split(param), role.split(value), strict=True):
                _, rows, columns = block.shape
                scale = update_scale(self.scale, rows, columns)
                target, block = (target.mT, block.mT) if rows > columns else (target, block)
                targets, blocks = groups[scale, block.shape[1], block.shape[2]]
                targets.append(target)
                blocks.append(block)
        return [(scale, *group) for (scale, _, _), group in groups.items()]

    def _scales(self) -> Tensor:
        """The factor of every block shape of every parameter, in their order, float64."""
        return torch.tensor(
            [
                update_scale(self.scale, rows, param.shape[-1])
                for name, param in self.params.items()
                for rows in self.roles[name].rows
            ],
            dtype=torch.float64,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """The momentum of every parameter, and what the updates are scaled by."""
        momenta = {f"momentum.{name}": buffer for name, buffer in self.buffers.items()}
        return {**momenta, "scales": self._scales()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; ValueError when updates are scaled otherwise now."""
        own = self._scales()
        if not torch.equal(tensors["scales"].cpu(), own):
            raise ValueError(
                "the checkpoint's Muon updates are scaled otherwise than by optim.muon_scale = "
                f"{self.scale!r} and optim.name of this run; give those that the run began with"
            )
        for name, buffer in self.buffers.items():
            buffer.copy_(tensors[f"momentum.{name}"])
