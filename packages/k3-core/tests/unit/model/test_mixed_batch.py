"""Decoding and prefilling sequences in one forward, and KDA states taken inside a prefill."""

from dataclasses import dataclass, field

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch

LENGTHS = (5, 9, 0, 3)
"""Tokens that the four sequences have before the batch under test."""


@pytest.fixture(scope="module")
def model(golden) -> K3ForConditionalGeneration:
    return K3ForConditionalGeneration(
        K3Config.from_file(golden("text_tiny")),
        dtype=torch.float64,
        impl_overrides={"kernel.kda_chunk": "kda_chunk.reference"},
        generator=torch.Generator().manual_seed(3),
    )


@dataclass
class Taken:
    """Keeps what the layers put."""

    offsets: tuple[tuple[int, ...], ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    windows: dict[int, torch.Tensor] = field(default_factory=dict)

    def put(self, layer, states_EHVK, windows_ECJ):
        self.states[layer], self.windows[layer] = states_EHVK, windows_ECJ


def fed(model, lengths, seed=0):
    """A cache whose slots hold random sequences of these lengths."""
    cache = model.new_cache(len(lengths))
    ids = torch.randint(0, 256, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    batch = SequenceBatch.from_lengths(lengths, cache=cache, num_decode=0)
    model.forward_packed(ids, batch)
    return cache


@torch.no_grad()
def test_a_mixed_batch_gives_what_its_parts_give(model):
    new = (1, 1, 6, 4)
    ids = torch.arange(sum(new)) * 7 % 256
    mixed = fed(model, LENGTHS)
    batch = SequenceBatch.from_lengths(new, cache=mixed)
    assert batch.num_decode == 2 and not batch.is_decode
    logits = model.forward_packed(ids, batch).logits
    alone = fed(model, LENGTHS)
    for slot, piece in enumerate(ids.split(new)):
        one = SequenceBatch.from_lengths([len(piece)], cache=alone, slots=[slot], num_decode=0)
        expected = model.forward_packed(piece, one).logits
        torch.testing.assert_close(logits.split(new)[slot], expected, atol=1e-11, rtol=0)
    assert mixed.lengths == alone.lengths == [6, 10, 6, 7]
    for layer in (i for i in range(8) if model.config.text.is_kda_layer(i)):
        close = {"atol": 1e-12, "rtol": 0}
        torch.testing.assert_close(mixed.kda_state(layer), alone.kda_state(layer), **close)
        torch.testing.assert_close(mixed.conv_state(layer), alone.conv_state(layer), **close)


@torch.no_grad()
@pytest.mark.parametrize("offsets", [((), (1, 2, 6), (4,)), ((), (), (1,)), ((), (6,), ())])
def test_checkpoints_are_the_states_of_a_batch_cut_there(model, offsets):
    new = (1, 6, 4)
    ids = torch.arange(sum(new)) * 11 % 256
    cache, taken = fed(model, (4, 0, 2)), Taken(offsets)
    batch = SequenceBatch.from_lengths(new, cache=cache, checkpoints=taken)
    model.forward_packed(ids, batch)
    index = 0
    for slot, piece in enumerate(ids.split(new)):
        for offset in offsets[slot]:
            cut = fed(model, (4, 0, 2))
            head = SequenceBatch.from_lengths([offset], cache=cut, slots=[slot], num_decode=0)
            model.forward_packed(piece[:offset], head)
            for layer, states in taken.states.items():
                torch.testing.assert_close(states[index], cut.kda_state(layer)[slot])
                torch.testing.assert_close(taken.windows[layer][index], cut.conv_state(layer)[slot])
            index += 1
    assert {len(states) for states in taken.states.values()} == {index}


@pytest.mark.parametrize("num_decode", [-1, 3])
def test_num_decode_counts_leading_sequences_of_one_token(model, num_decode):
    with pytest.raises(ValueError, match=rf"num_decode {num_decode} is not in 0\.\.1"):
        SequenceBatch.from_lengths([1, 2, 1], cache=model.new_cache(3), num_decode=num_decode)
    with pytest.raises(ValueError, match=r"0\.\.0"):
        SequenceBatch.from_lengths([1, 1], num_decode=1)


def test_tokens_know_their_slot_and_position(model):
    cache = model.new_cache(4)
    cache.advance((3, 1), (5, 2))
    batch = SequenceBatch.from_lengths([1, 3], cache=cache, slots=[3, 1])
    assert batch.slots_T.tolist() == [3, 1, 1, 1]
    assert batch.positions_T.tolist() == [5, 2, 3, 4]
    assert batch.prefilling.cu_seqlens_N1.tolist() == [0, 3]
    assert batch.decoding.starts == (5,) and batch.decoding.is_decode


@torch.no_grad()
def test_a_cut_forward_gives_the_asked_rows_and_the_same_cache(model):
    new, rows = (1, 1, 6, 4), torch.tensor([0, 1, 7, 11])
    ids = torch.arange(sum(new)) * 7 % 256
    whole, cut = fed(model, LENGTHS), fed(model, LENGTHS)
    expected = model.forward_packed(ids, SequenceBatch.from_lengths(new, cache=whole))
    batch = SequenceBatch.from_lengths(new, cache=cut)
    out = model.forward_packed(ids, batch, logit_rows=rows, is_cut=True)
    for own, full in (
        (out.logits, expected.logits),
        (out.hidden_TD, expected.hidden_TD),
        (out.mix_TD, expected.mix_TD),
    ):
        torch.testing.assert_close(own, full[rows], atol=1e-11, rtol=0)
    after = [
        model.forward_packed(ids[:4], SequenceBatch.from_lengths([1] * 4, cache=cache)).logits
        for cache in (whole, cut)
    ]
    torch.testing.assert_close(after[1], after[0], atol=1e-11, rtol=0)


def test_a_cut_forward_refuses_what_needs_all_rows(model):
    ids, batch = torch.arange(4), SequenceBatch.from_lengths([4])
    with pytest.raises(ValueError, match="is_cut needs logit_rows"):
        model.forward_packed(ids, batch, is_cut=True)
    with pytest.raises(ValueError, match="no hidden states"):
        rows = torch.tensor([3])
        model.forward_packed(ids, batch, logit_rows=rows, is_cut=True, output_hidden_states=True)
