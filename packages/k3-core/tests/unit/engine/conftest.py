"""A model whose logits are a pure function of a sequence's ids, for testing engines exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

VOCAB = 40


class FakeCache:
    """The ids that each slot has been fed."""

    def __init__(self, num_slots: int) -> None:
        self.fed: list[list[int]] = [[] for _ in range(num_slots)]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.fed]

    def reset(self, slot: int) -> None:
        self.fed[slot] = []


class FakeModel(torch.nn.Module):
    """Logits of a row = noise seeded by the weight and all ids up to the row.

    An id in `bad_ids` makes the rows after it NaN; one in `raising_ids` raises.
    """

    def __init__(self, max_length: int = 64) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        text = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=max_length)
        vision = SimpleNamespace(merge_kernel_size=(2, 2))
        self.config = SimpleNamespace(text=text, vision=vision)
        self.bad_ids: set[int] = set()
        self.raising_ids: set[int] = set()
        self.gate: Callable[[], object] = lambda: None
        self.batch_sizes: list[int] = []
        self.begun: list[int] = []
        """The first id of every prompt, in the order in which they were begun."""

    def new_cache(self, batch_size: int) -> FakeCache:
        return FakeCache(batch_size)

    def row(self, ids: list[int]) -> torch.Tensor:
        seed = hash((self.weight.item(), *ids)) % 2**31
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        return logits * float("nan") if self.bad_ids & set(ids) else logits

    def embed_prompt(self, ids_T, pixel_values, grid_thws):  # type: ignore[no-untyped-def]
        """Rows of width 1 holding ids; id 7 stands for an image and becomes three rows of 39."""
        assert pixel_values.shape[0] == int(grid_thws.prod(-1).sum())
        rows = [row for i in ids_T.tolist() for row in ([39] * 3 if i == 7 else [i])]
        return torch.tensor(rows, dtype=torch.float32)[:, None]

    def forward_packed(self, input_ids_T, batch, *, inputs_embeds_TD=None, logit_rows=None):  # type: ignore[no-untyped-def]
        self.gate()
        ids_T = input_ids_T if inputs_embeds_TD is None else inputs_embeds_TD[:, 0].long()
        ids = ids_T.tolist()
        if self.raising_ids & set(ids):
            raise RuntimeError("kernel fault")
        self.batch_sizes.append(len(batch.seqlens))
        rows, at = [], 0
        for slot, start, length in zip(batch.slots, batch.starts, batch.seqlens, strict=True):
            fed = batch.cache.fed[slot]
            assert start == len(fed)
            if start == 0:
                self.begun.append(ids[at])
            for token_id in ids[at : at + length]:
                fed.append(token_id)
                rows.append(self.row(fed))
            at += length
        logits = torch.stack(rows)
        return SimpleNamespace(logits=logits if logit_rows is None else logits[logit_rows])


@dataclass(frozen=True)
class Letters:
    """A tokenizer of one byte a token: id i is the letter a + i."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])


@pytest.fixture
def fake_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def letters() -> Letters:
    return Letters()
