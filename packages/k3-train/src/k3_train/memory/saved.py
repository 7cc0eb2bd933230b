"""Hooks on what autograd saves: each value is packed once, whoever saves it.

Several ops save the same tensor, or views of one. Without hooks these share its memory, so what is
packed in its place is shared too: a view is packed as its base, and cut out of it again.
N values of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from k3_train.memory.base import MemoryPolicy, Packed


@dataclass(eq=False)
class _Unit:
    """Values of one storage, packed. The storage is not kept, but no other takes its identity."""

    storage: StorageWeakRef
    packed: Packed


class _View(NamedTuple):
    """A saved tensor as a part of a unit's values."""

    unit: _Unit
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Saver:
    """Packs and unpacks by several policies."""

    def __init__(self, policies: Sequence[MemoryPolicy]) -> None:
        self.policies = sorted(policies, key=lambda policy: policy.order)
        self._units: WeakValueDictionary[tuple, _Unit] = WeakValueDictionary()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves by the policies."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @torch.no_grad()
    def _pack(self, x: Tensor) -> Tensor | _View:
        base = x if x._base is None else x._base
        policies = [] if _is_parameter(base) else _from_first(self.policies, x)
        if not policies or not x.numel():
            # Without its history: an op's own result would keep itself alive.
            return x.detach()
        storage = x.untyped_storage()
        if storage.nbytes() == base.nbytes and base.dtype == x.dtype:
            values_N = base.detach().as_strided((base.numel(),), (1,), 0)
            place: tuple = (tuple(x.shape), x.stride(), x.storage_offset())
            key: tuple = ()
        else:  # a part of a buffer whose other parts may hold anything
            own = x.detach().contiguous()
            values_N, place = own.view(-1), (tuple(x.shape), own.stride(), 0)
            key = (tuple(x.shape), x.stride(), x.storage_offset())
        key = (storage._cdata, x._version, x.dtype, len(policies), *key)
        unit = self._units.get(key)
        if unit is None:
            unit = _Unit(StorageWeakRef(storage), _packed(values_N, policies))
            self._units[key] = unit
        return _View(unit, *place)

    @torch.no_grad()
    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.unit.packed.unpack().as_strided(saved.size, saved.stride, saved.offset)


def _from_first(policies: Sequence[MemoryPolicy], x: Tensor) -> Sequence[MemoryPolicy]:
    """The policies from the first one that wants `x`."""
    for index, policy in enumerate(policies):
        if policy.wants(x):
            return policies[index:]
    return ()


def _packed(values_N: Tensor, policies: Sequence[MemoryPolicy]) -> Packed:
    """The values packed by the first policy, each part by those of the others that want it."""
    packed = policies[0].pack(values_N)
    left = [(part, _from_first(policies[1:], part)) for part in packed.parts]
    parts = [_packed(part, rest) if rest else part for part, rest in left]
    return Packed(parts, packed.restore)


def _is_parameter(base: Tensor) -> bool:
    """Whether it is a parameter, or several side by side, in any dtype: those stay anyway."""
    if base.grad_fn is None:
        return isinstance(base, nn.Parameter)
    sources = [node for node, _ in base.grad_fn.next_functions if node is not None]
    leaves = [node.variable for node in sources if hasattr(node, "variable")]
    if len(leaves) < len(sources) or not all(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return False
    return sum(leaf.numel() for leaf in leaves) == base.numel()
