"""Per-Head Muon: momentum orthogonalised block by block (report 5, training 3.4).

N stacked blocks, r rows, c columns. M <- mu M + G; the Nesterov input G + mu M is cut into
the blocks of each parameter's role; W <- W - lr (0.2 sqrt(max(r, c)) O + lambda W) with r, c of
the block, which is our reading of a rule that the report does not restate (Moonlight's RMS match).
Momentum is stored, never the update.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from k3_train.optim.roles import Role

UPDATE_RMS = 0.2
"""Root mean square of an update, matched to AdamW's (Moonlight)."""


class PerHeadMuon:
    """Muon over parameters with `Role.rule == "muon"`; blocks of one shape share one iteration.

    newton_schulz: the op, `[N, r, c] -> [N, r, c]`. A parameter whose gradient is None is not
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
    ) -> None:
        self.params = dict(params)
        self.roles = roles
        self.newton_schulz = newton_schulz
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.buffers = {name: torch.zeros_like(param) for name, param in self.params.items()}

    @torch.no_grad()
    def step(self, lr_factor: float) -> None:
        """One update with learning rate `lr * lr_factor`."""
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        if not grads:
            return
        lr = self.lr * lr_factor
        names = list(grads)
        params: list[Tensor] = [self.params[name] for name in names]
        buffers = [self.buffers[name] for name in names]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, list(grads.values()))
        inputs = torch._foreach_add(list(grads.values()), buffers, alpha=self.momentum)
        torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        for targets, blocks in self._groups(names, params, inputs):
            self._apply(targets, blocks, lr)

    def _groups(
        self, names: Sequence[str], params: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Blocks of equal shape together: (views of the parameters, blocks [n, r, c]), wide."""
        groups: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, param, value in zip(names, params, inputs, strict=True):
            role = self.roles[name]
            for target, block in zip(role.split(param), role.split(value), strict=True):
                is_tall = block.shape[1] > block.shape[2]
                target, block = (target.mT, block.mT) if is_tall else (target, block)
                targets, blocks = groups[block.shape[1], block.shape[2]]
                targets.append(target)
                blocks.append(block)
        return list(groups.values())

    def _apply(self, targets: list[Tensor], blocks: list[Tensor], lr: float) -> None:
        stacked_Nrc = torch.cat(blocks)
        scale = UPDATE_RMS * math.sqrt(max(stacked_Nrc.shape[1:]))
        updates = self.newton_schulz(stacked_Nrc).split([len(block) for block in blocks])
        torch._foreach_add_(targets, updates, alpha=-lr * scale)

    def state_tensors(self) -> dict[str, Tensor]:
        """The momentum of every parameter."""
        return {f"momentum.{name}": buffer for name, buffer in self.buffers.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        for name, buffer in self.buffers.items():
            buffer.copy_(tensors[f"momentum.{name}"])
