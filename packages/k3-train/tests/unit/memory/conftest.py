"""Shared by the tests of memory policies: a model with every kind of layer, and a census."""

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_train.memory.apply import apply_memory

LENGTHS = (120, 136)


class Census(TorchDispatchMode):
    """Remembers every storage that an operator returned, but for those of `known` tensors.

    It works at torch's dispatcher and knows nothing of hooks and policies.
    """

    def __init__(self, known=()):
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def num_bytes(self):
        """Of the storages that are still there."""
        return sum(
            size
            for address, (reference, size) in self._storages.items()
            if address not in self._known and not reference.expired()
        )


class Run:
    """A model under a table of policies, and one loss of it."""

    def __init__(self, table, *, is_autocast=False, impl=None):
        base = K3Config.preset("k3-test")
        text = dataclasses.replace(base.text, num_nextn_predict_layers=1, mtp_share_embeddings=True)
        generator = torch.Generator().manual_seed(0)
        config = dataclasses.replace(base, text=text)
        self.model = K3ForConditionalGeneration(config, generator=generator, impl_overrides=impl)
        self.model.train()
        self.is_autocast = is_autocast
        apply_memory(self.model, table)
        ids = torch.randint(0, text.vocab_size, (sum(LENGTHS) + 1,), generator=generator)
        self.ids_T, self.labels_T = ids[:-1], ids[1:]

    def loss(self):
        """The training loss, in bfloat16 autocast if asked for."""
        batch = SequenceBatch.from_lengths(LENGTHS)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
            return self.model.training_loss(self.ids_T, self.labels_T, batch, mtp_weight=0.3)[0]

    def gradients(self):
        """(loss, gradient by parameter)."""
        loss = self.loss()
        loss.backward()
        named = self.model.named_parameters()
        return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


@pytest.fixture(scope="session")
def plain():
    """(loss, gradients) without policies, by whether autocast is on."""
    return {is_on: Run({}, is_autocast=is_on).gradients() for is_on in (False, True)}


@pytest.fixture(scope="session")
def make_run():
    """The class `Run`."""
    return Run


@pytest.fixture(scope="session")
def make_census():
    """The class `Census`."""
    return Census
