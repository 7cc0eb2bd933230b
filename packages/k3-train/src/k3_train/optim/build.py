"""The two optimizers that this package registers: per_head_muon and adamw (report 5)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from k3_core.config import TextConfig
from k3_train.config import OptimConfig
from k3_train.optim.adamw import RoleAdamW
from k3_train.optim.base import JointOptimizer
from k3_train.optim.per_head_muon import PerHeadMuon
from k3_train.optim.roles import Role, assign_roles


def per_head_muon(
    params: Mapping[str, Parameter],
    *,
    text: TextConfig,
    optim: OptimConfig,
    newton_schulz: Callable[..., Tensor],
) -> JointOptimizer:
    """Per-Head Muon for matrices, AdamW for the rest; `params` are all of the model's."""
    roles = _roles(params, text)
    matrices = {name: p for name, p in params.items() if roles[name].rule == "muon"}
    others = {name: p for name, p in params.items() if roles[name].rule == "adamw"}
    steps = optim.newton_schulz_steps

    def iterate(blocks: Tensor) -> Tensor:
        # bf16 on a GPU (report 5); a CPU has no fast bf16 product, and fp32 is the exact mode.
        dtype = torch.bfloat16 if blocks.is_cuda else None
        return newton_schulz(blocks, steps=steps, dtype=dtype)

    muon = PerHeadMuon(
        matrices,
        roles,
        newton_schulz=iterate,
        lr=optim.muon_lr,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
    )
    return JointOptimizer({"muon": muon, "adamw": RoleAdamW(others, roles, optim)})


def adamw(
    params: Mapping[str, Parameter],
    *,
    text: TextConfig,
    optim: OptimConfig,
    newton_schulz: Callable[..., Tensor],
) -> JointOptimizer:
    """AdamW for every parameter, with the decay of its role (the baseline of an ablation)."""
    del newton_schulz
    roles = _roles(params, text)
    trained = {name: p for name, p in params.items() if roles[name].rule != "frozen"}
    return JointOptimizer({"adamw": RoleAdamW(trained, roles, optim)})


def _roles(params: Mapping[str, Parameter], text: TextConfig) -> dict[str, Role]:
    return assign_roles(((name, tuple(param.shape)) for name, param in params.items()), text)
