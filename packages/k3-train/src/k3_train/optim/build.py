"""The optimizers that this package registers: per_head_muon, muon and adamw (report 5)."""

from collections.abc import Callable, Mapping
from functools import partial

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
    return _joint(params, _roles(params, text), optim, newton_schulz)


def muon(
    params: Mapping[str, Parameter],
    *,
    text: TextConfig,
    optim: OptimConfig,
    newton_schulz: Callable[..., Tensor],
) -> JointOptimizer:
    """Muon of whole matrices, AdamW for the rest (a baseline of `per_head_muon`).

    Heads, keys and values of one stored matrix are orthogonalised together; experts are not.
    """
    roles = {name: role.whole_matrix() for name, role in _roles(params, text).items()}
    return _joint(params, roles, optim, newton_schulz)


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


def _joint(
    params: Mapping[str, Parameter],
    roles: Mapping[str, Role],
    optim: OptimConfig,
    newton_schulz: Callable[..., Tensor],
) -> JointOptimizer:
    matrices = {name: p for name, p in params.items() if roles[name].rule == "muon"}
    others = {name: p for name, p in params.items() if roles[name].rule == "adamw"}
    # bf16 on a GPU (report 5); a CPU has no fast bf16 product, and fp32 is the exact mode.
    is_cuda = any(param.is_cuda for param in matrices.values())
    by_matrix = PerHeadMuon(
        matrices,
        roles,
        newton_schulz=partial(newton_schulz, steps=optim.newton_schulz_steps),
        lr=optim.muon_lr,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
        dtype=torch.bfloat16 if is_cuda else None,
        scale=optim.muon_scale,
    )
    return JointOptimizer({"muon": by_matrix, "adamw": RoleAdamW(others, roles, optim)})


def _roles(params: Mapping[str, Parameter], text: TextConfig) -> dict[str, Role]:
    return assign_roles(((name, tuple(param.shape)) for name, param in params.items()), text)
