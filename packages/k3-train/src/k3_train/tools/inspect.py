"""What a configuration trains: roles, parameters, FLOPs a token and the memory of its state.

Nothing is allocated: the model and the optimizer are built of tensors without memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from k3_core.config import K3Config, count_parameters
from k3_core.model import K3ForConditionalGeneration
from k3_core.plugins import resolve
from k3_train.balance.base import routers_of
from k3_train.config import TrainConfig
from k3_train.loop.build import model_config
from k3_train.loop.curriculum import Curriculum
from k3_train.optim.roles import Role, assign_roles


@dataclass(frozen=True)
class RoleRow:
    """Parameters of one role. blocks: the matrices that Muon orthogonalises, counted by shape."""

    role: str
    rule: str
    is_decayed: bool
    num_tensors: int
    num_parameters: int
    blocks: dict[str, int]


@dataclass(frozen=True)
class Report:
    """What `k3 train inspect` prints; FLOPs are of training (3 x forward), bytes of float32.

    dense_flops: 6 x active parameters, the unembedding counted. attention_flops: the scores and
    sums of MLA over a piece of `max_seq_len` tokens, half of it seen on average, and the state of
    KDA. state_bytes: parameters, gradients, optimizer and balancer; activations are not in it.
    """

    roles: list[RoleRow]
    total: int
    active: int
    active_without_head: int
    dense_flops: int
    attention_flops: int
    max_seq_len: int
    state_bytes: dict[str, int]


def inspect_config(config: TrainConfig) -> Report:
    """Build everything without memory and count it."""
    settings = model_config(config.model)
    with FakeTensorMode():
        model = K3ForConditionalGeneration(settings, device="cpu", initialize=False)
        params = dict(model.named_parameters())
        shapes = [(name, tuple(param.shape)) for name, param in params.items()]
        build: Any = resolve("optimizer", config.optim.name, overrides=config.impl).load()
        optimizer = build(
            params, text=settings.text, optim=config.optim, newton_schulz=torch.ops.aten.clone
        )
        state = {
            "parameters": sum(param.nbytes for param in params.values()),
            "gradients": sum(param.nbytes for param in params.values()),
            "optimizer": sum(one.nbytes for one in optimizer.state_tensors().values()),
            "histograms": _histogram_bytes(config, model),
        }
    counts = count_parameters(settings)
    max_seq_len = Curriculum(config).grain
    return Report(
        roles=_role_rows(shapes, assign_roles(shapes, settings.text)),
        total=counts.total,
        active=counts.active,
        active_without_head=counts.active_without_head,
        dense_flops=6 * counts.active,
        attention_flops=attention_flops(settings, max_seq_len),
        max_seq_len=max_seq_len,
        state_bytes=state,
    )


def attention_flops(config: K3Config, max_seq_len: int) -> int:
    """Training FLOPs a token of what attention does beside its matrices.

    MLA: 2 x (L/2) x heads x (key dim + value dim). KDA: decay, erase, write and read of a state
    [V, K] a head, 2 FLOPs each. Three times that with the backward.
    """
    text, linear = config.text, config.text.linear_attn_config
    key_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    mla = max_seq_len * text.num_attention_heads * (key_dim + text.v_head_dim)
    kda = 8 * linear.num_heads * linear.head_dim**2
    return 3 * (mla * len(linear.full_attn_layers) + kda * len(linear.kda_layers))


def as_dict(report: Report) -> dict[str, Any]:
    """The report in JSON values."""
    return asdict(report)


def _histogram_bytes(config: TrainConfig, model: K3ForConditionalGeneration) -> int:
    if config.balance.name != "quantile_histogram":
        return 0
    return len(routers_of(model)) * model.config.text.num_experts * config.balance.num_bins * 4


def _role_rows(shapes: list[tuple[str, tuple[int, ...]]], roles: dict[str, Role]) -> list[RoleRow]:
    rows: dict[str, RoleRow] = {}
    for name, shape in shapes:
        role = roles[name]
        row = rows.get(role.name) or RoleRow(role.name, role.rule, role.is_decayed, 0, 0, {})
        blocks = dict(row.blocks)
        for num_rows in role.rows:
            key = f"{num_rows}x{shape[-1]}"
            blocks[key] = blocks.get(key, 0) + role.blocks
        rows[role.name] = RoleRow(
            row.role,
            row.rule,
            row.is_decayed,
            row.num_tensors + 1,
            row.num_parameters + prod(shape),
            blocks,
        )
    return sorted(rows.values(), key=lambda row: (row.rule != "muon", -row.num_parameters))
