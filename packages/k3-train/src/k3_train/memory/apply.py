"""From the table `[memory]` to a built model whose annotated functions follow their policies.

The model's code knows nothing of it: `forward` of a module object, and ops of the model's `OpSet`,
are replaced by calls that do the same. Without gradients they are the plain ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from k3_core.config import ConfigError
from k3_core.model import K3ForConditionalGeneration
from k3_core.plugins import resolve
from k3_train.balance.base import routers_of
from k3_train.memory import patterns
from k3_train.memory.base import MemoryPolicy
from k3_train.memory.scope import Entry, Policies, Scopes

COUNTING_OPS = ("route_topk",)
"""Ops that count for a balancer where they run; to run again, they need their router around."""


def apply_memory(
    model: K3ForConditionalGeneration,
    table: Mapping[str, object],
    overrides: Mapping[str, str] | None = None,
) -> Scopes:
    """Annotate `model`, whose ops are bound; `overrides` is the `[impl]` table.

    Nobody may call some of these functions: see `unused` of what is returned.
    Raises ConfigError for a key that fits nothing and a module that cannot follow its policies,
    ImplUnavailable for an unknown policy.
    """
    names = patterns.policy_names(table)
    built = {
        name: _build(name, model.device, overrides)
        for name in dict.fromkeys(name for own in names.values() for name in own)
    }
    policies = {key: tuple(built[name] for name in own) for key, own in names.items()}
    scopes = Scopes()
    _annotate_modules(model, policies, scopes)
    _annotate_ops(model, policies, scopes)
    return scopes


def _build(name: str, device: torch.device, overrides: Mapping[str, str] | None) -> MemoryPolicy:
    target: Any = resolve("memory_policy", name, device=device.type, overrides=overrides).load()
    return target(device)


def _annotate_modules(model: nn.Module, policies: Mapping[str, Policies], scopes: Scopes) -> None:
    modules = {patterns.short_name(name): one for name, one in model.named_modules() if name}
    keys = [key for key in policies if not key.startswith(patterns.OP)]
    for name, key in patterns.match_modules(keys, modules).items():
        module = modules[name]
        entry = _entry(name, key, module, policies[key])
        scopes.unused[name] = None
        # Of the class, not bound: so a deep copy of the module runs itself.
        module.forward = partial(  # type: ignore[method-assign]
            scopes.call, entry, type(module).forward, module
        )


def _entry(name: str, key: str, module: nn.Module, policies: Policies) -> Entry:
    """The entry of a module; ConfigError when it cannot be called so."""
    forward, path = type(module).forward, patterns.path_of(key)
    if forward is nn.Module.forward:
        raise ConfigError(path, f"{name} is never called", "Name the module around it.")
    if not any(policy.runs_again for policy in policies):
        return Entry(name, policies)
    if inspect.signature(forward).return_annotation in (None, "None"):
        raise ConfigError(
            path,
            f"{name} changes its arguments, so it cannot run again",
            f"Name what it holds, such as {key}.self_attn.",
        )
    # From rounded inputs a router would choose other experts than the loss was made with.
    has_router = bool(routers_of(module))
    if has_router and not all(policy.is_exact for policy in policies):
        raise ConfigError(
            path,
            f"{name} routes, so what it runs again from cannot be rounded",
            "Leave one of the two policies out.",
        )
    return Entry(name, policies, is_exact=has_router)


def _annotate_ops(
    model: K3ForConditionalGeneration, policies: Mapping[str, Policies], scopes: Scopes
) -> None:
    functions = {name: f for name, f in vars(model.ops).items() if callable(f)}
    for key, own in policies.items():
        if not key.startswith(patterns.OP):
            continue
        op = patterns.check_op(key, functions)
        if op in COUNTING_OPS and any(policy.runs_again for policy in own):
            raise ConfigError(
                patterns.path_of(key),
                f"{op} counts for the balancer, so it cannot run again alone",
                'Use "layers.*.block_sparse_moe".',
            )
        scopes.unused[key] = None
        setattr(model.ops, op, _annotated(functions[op], Entry(key, own), scopes))


def _annotated(function: Callable[..., Any], entry: Entry, scopes: Scopes) -> Callable[..., Any]:
    # Kernels know the functions that they are given by their names.
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return scopes.call(entry, function, *args, **kwargs)

    return call
