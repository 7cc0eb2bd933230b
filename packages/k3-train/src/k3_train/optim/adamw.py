"""AdamW by role: torch's own, with a state that can be saved by parameter name.

Learning rates: embedding and output head have their own peak (our own choice); vectors, gates
and pseudo-queries do not decay.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from k3_train.config import OptimConfig
from k3_train.optim.roles import Role

_STATE = ("step", "exp_avg", "exp_avg_sq")
_EMBEDDING_ROLES = frozenset({"embedding", "head"})


class RoleAdamW:
    """torch.optim.AdamW over named parameters, grouped by peak learning rate and decay."""

    def __init__(
        self, params: Mapping[str, Parameter], roles: Mapping[str, Role], optim: OptimConfig
    ) -> None:
        self.params = dict(params)
        groups: dict[tuple[float, float], list[Parameter]] = defaultdict(list)
        for name, param in self.params.items():
            role = roles[name]
            lr = optim.embedding_lr if role.name in _EMBEDDING_ROLES else optim.adamw_lr
            groups[lr, optim.weight_decay if role.is_decayed else 0.0].append(param)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": group, "lr": lr, "peak_lr": lr, "weight_decay": decay}
                for (lr, decay), group in groups.items()
            ],
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        # torch makes the state at the first gradient; made here, a checkpoint is always whole.
        for param in self.params.values():
            self._optimizer.state[param] = {
                "step": torch.zeros((), device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }

    def step(self, lr_factor: float) -> None:
        """One update with every group at its peak learning rate times `lr_factor`."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        self._optimizer.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """Step count and both moments of every parameter."""
        return {
            f"{key}.{name}": self._optimizer.state[param][key]
            for name, param in self.params.items()
            for key in _STATE
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])
