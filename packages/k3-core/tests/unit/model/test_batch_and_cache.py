"""SequenceBatch, the contiguous cache, and the padded front: arguments and errors."""

import pytest
import torch

from k3_core.cache.base import KDASpec, MLASpec
from k3_core.cache.contiguous import ContiguousCache
from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch

SPECS = {0: KDASpec(2, 4, 24, 4), 1: MLASpec(6)}


def test_lengths_offsets_and_first_positions():
    cache = ContiguousCache(SPECS, 3)
    cache.advance((0, 2), (4, 0))
    batch = SequenceBatch.from_lengths([2, 0, 3], cache=cache, slots=[0, 1, 2])
    assert batch.cu_seqlens_N1.tolist() == [0, 2, 2, 5]
    assert batch.starts == (4, 0, 0) and batch.total_lengths == (6, 0, 3)
    assert batch.is_first_T.tolist() == [False, False, True, False, False]
    assert not batch.is_decode
    assert SequenceBatch.from_lengths([1, 1], cache=cache).is_decode
    assert not SequenceBatch.from_lengths([1, 1]).is_decode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seqlens": [-1]}, "negative"),
        ({"seqlens": [1], "slots": [0]}, "without a cache"),
        ({"seqlens": [1, 1], "slots": [0, 0], "with_cache": True}, "distinct"),
        ({"seqlens": [1], "slots": [3], "with_cache": True}, r"0\.\.2"),
    ],
)
def test_bad_batches_are_refused(arguments, message):
    arguments = dict(arguments)
    cache = ContiguousCache(SPECS, 3) if arguments.pop("with_cache", False) else None
    with pytest.raises(ValueError, match=message):
        SequenceBatch.from_lengths(cache=cache, **arguments)


def test_latents_grow_and_keep_their_rows():
    cache = ContiguousCache(SPECS, 2)
    rows = torch.randn(700, 6)
    for piece in rows.split(300):
        batch = SequenceBatch.from_lengths([len(piece)], cache=cache, slots=[1])
        cache.append_latent(1, batch, piece)
        cache.advance(batch.slots, batch.seqlens)
    pages, table = cache.latent_pages(1, batch)
    assert torch.equal(pages[table[0]].flatten(0, 1)[:700], rows)


def test_a_full_cache_names_its_limit():
    cache = ContiguousCache(SPECS, 1, max_length=4)
    with pytest.raises(ValueError, match="max_length 4"):
        batch = SequenceBatch.from_lengths([2], cache=cache, starts=[3])
        cache.append_latent(1, batch, torch.zeros(2, 6))


@pytest.mark.parametrize("length", [0, -3])
def test_a_cache_holds_at_least_a_token(length):
    with pytest.raises(ValueError, match=f"max_length {length}"):
        ContiguousCache(SPECS, 1, max_length=length)


def test_what_does_not_fit_is_refused_before_the_cache_is_touched(golden):
    model = K3ForConditionalGeneration(K3Config.from_file(golden("text_tiny")))
    cache, ids = model.new_cache(2, max_length=5), torch.arange(8).view(2, 4)
    with torch.no_grad():
        model(input_ids=ids, cache=cache)
        before = cache.kda_state(0).clone(), cache.conv_state(0).clone()
        with pytest.raises(ValueError, match="8 tokens does not fit the cache of max_length 5"):
            model(input_ids=ids, cache=cache)
    assert cache.lengths == [4, 4]
    assert torch.equal(cache.kda_state(0), before[0])
    assert torch.equal(cache.conv_state(0), before[1])


@pytest.mark.parametrize("wrong", [-1, 256])
def test_ids_outside_the_vocabulary_are_named(golden, wrong):
    model = K3ForConditionalGeneration(K3Config.from_file(golden("text_tiny")))
    with pytest.raises(IndexError, match=rf"{wrong}\b.*vocabulary is 0\.\.255"):
        model(input_ids=torch.tensor([[3, wrong]]))


def test_reset_forgets_one_slot_only(golden):
    config = K3Config.from_file(golden("text_tiny"))
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))
    cache, ids = model.new_cache(2), torch.arange(10).view(2, 5)
    with torch.no_grad():
        first = model(input_ids=ids, cache=cache).logits
        cache.reset(0)
        assert cache.lengths == [0, 5]
        row = SequenceBatch.from_lengths([5], cache=cache, slots=[0])
        again = model.forward_packed(ids[0], row).logits
    torch.testing.assert_close(again, first[0], atol=1e-6, rtol=0)
    assert not (cache.kda_state(0)[1] == 0).all()


def test_a_reset_slot_reads_nothing_that_it_was_not_given(golden):
    """Every tensor of the cache is NaN beforehand; prefill and decode see none of it."""
    config = K3Config.from_file(golden("text_tiny"))
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(9)[None]
    cache = model.new_cache(1, max_length=16)
    text = config.text
    for layer in range(text.num_hidden_layers):
        if text.is_kda_layer(layer):
            cache.kda_state(layer).fill_(float("nan"))
            cache.conv_state(layer).fill_(float("nan"))
        else:
            cache.latent_pages(layer, SequenceBatch.from_lengths([1], cache=cache))[0].fill_(
                float("nan")
            )
    cache.reset(0)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        pieces = (ids[:, :2], ids[:, 2:7], *ids[:, 7:].split(1, dim=1))
        cached = torch.cat([model(input_ids=piece, cache=cache).logits for piece in pieces], dim=1)
    torch.testing.assert_close(cached, whole, atol=1e-5, rtol=0)


def test_left_and_right_padding_agree(golden):
    config = K3Config.from_file(golden("text_tiny"))
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(6)
    left = torch.cat((torch.zeros(3, dtype=torch.int64), ids))[None]
    right = torch.cat((ids, torch.zeros(3, dtype=torch.int64)))[None]
    with torch.no_grad():
        plain = model(input_ids=ids[None]).logits[0]
        a = model(input_ids=left, attention_mask=(torch.arange(9) >= 3)[None].long())
        b = model(input_ids=right, attention_mask=(torch.arange(9) < 6)[None].long())
    torch.testing.assert_close(a.logits[0, 3:], plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(b.logits[0, :6], plain, atol=1e-6, rtol=0)
    assert (a.logits[0, :3] == 0).all() and (b.logits[0, 6:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "message"), [(torch.ones(2, 4), "does not fit"), (torch.ones(1, 2), "covers 2")]
)
def test_masks_that_do_not_fit_are_refused(golden, mask, message):
    model = K3ForConditionalGeneration(K3Config.from_file(golden("text_tiny")))
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.arange(4)[None], attention_mask=mask)


def test_images_need_a_vision_tower(golden):
    model = K3ForConditionalGeneration(K3Config.from_file(golden("text_tiny")))
    with pytest.raises(ValueError, match="no vision tower"):
        model(input_ids=torch.arange(4)[None], pixel_values=torch.zeros(4, 3, 14, 14))
    with pytest.raises(ValueError, match="grid_thws without pixel_values"):
        model(input_ids=torch.arange(4)[None], grid_thws=torch.tensor([[1, 2, 2]]))


def test_replayed_routes_are_checked(golden):
    model = K3ForConditionalGeneration(K3Config.from_file(golden("text_tiny")))
    for layer, routes, message in (
        (1, torch.zeros(3, 4, dtype=torch.int64), r"replayed routes are \(3, 4\)"),
        (1, torch.full((4, 4), 16), r"outside 0\.\.15"),
        (1, torch.zeros(4, 4), r"torch\.float32; give integer"),
        (0, torch.zeros(4, 4, dtype=torch.int64), r"layers \[0\].* are \[1, 2,"),
        (9, torch.zeros(4, 4, dtype=torch.int64), r"layers \[9\]"),
    ):
        batch = SequenceBatch.from_lengths([4], routes={layer: routes})
        with pytest.raises(ValueError, match=message):
            model.forward_packed(torch.arange(4), batch)
