"""A verify forward and `accept` leave what single tokens leave; nothing else is touched."""

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch

IDS = torch.arange(40, 100).view(3, 20)
PREFIXES, SPANS, ACCEPTED = (7, 1, 4), (4, 1, 3), (2, 1, 3)


@pytest.fixture(scope="module")
def model():
    model = K3ForConditionalGeneration(
        K3Config.preset("k3-test"),
        dtype=torch.float64,
        impl_overrides={"kernel.kda_chunk": "kda_chunk.reference"},
        generator=torch.Generator().manual_seed(0),
    )
    return model.eval()


def forward(model, cache, slots, starts, counts, **options):
    ids = torch.cat([IDS[s, a : a + n] for s, a, n in zip(slots, starts, counts, strict=True)])
    batch = SequenceBatch.from_lengths(counts, cache=cache, slots=slots, **options)
    assert batch.starts == tuple(starts)
    return model.forward_packed(ids, batch).logits, batch


def states(model, cache):
    return [cache.kda_state(0).clone(), cache.conv_state(0).clone()]


@torch.no_grad()
@pytest.mark.parametrize("spans", [SPANS, (3, 3, 3)])
def test_accepted_tokens_count_and_others_leave_nothing(model, spans):
    slots = [0, 1, 2]
    verified, single = model.new_cache(3), model.new_cache(3)
    for cache in (verified, single):
        forward(model, cache, slots, [0, 0, 0], PREFIXES, num_decode=0)
    before = states(model, verified)
    logits, batch = forward(model, verified, slots, PREFIXES, spans, num_decode=3, is_verify=True)
    assert all(map(torch.equal, states(model, verified), before))
    assert verified.lengths == list(PREFIXES)
    rows = logits.split(spans)
    accepted = [min(pair) for pair in zip(spans, ACCEPTED, strict=True)]
    batch.accept(accepted)
    for slot in slots:
        for offset in range(accepted[slot]):
            one, _ = forward(model, single, [slot], [PREFIXES[slot] + offset], [1])
            torch.testing.assert_close(rows[slot][offset], one[0], atol=1e-9, rtol=0)
    for got, wanted in zip(states(model, verified), states(model, single), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    assert verified.lengths == single.lengths
    ends = list(verified.lengths)
    for cache in (verified, single):
        cache.after, _ = forward(model, cache, slots, ends, [1, 1, 1])
    torch.testing.assert_close(verified.after, single.after, atol=1e-9, rtol=0)


@torch.no_grad()
def test_prompts_in_the_same_forward_are_not_held_back(model):
    mixed, plain = model.new_cache(3), model.new_cache(3)
    for cache in (mixed, plain):
        forward(model, cache, [0], [0], [5])
    logits, batch = forward(model, mixed, [0, 2], [5, 0], [3, 6], num_decode=1, is_verify=True)
    alone, _ = forward(model, plain, [2], [0], [6], num_decode=0)
    torch.testing.assert_close(logits[3:], alone, atol=1e-9, rtol=0)
    assert mixed.lengths == [5, 0, 6]
    batch.accept([1])
    forward(model, plain, [0], [5], [1])
    for got, wanted in zip(states(model, mixed), states(model, plain), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_spans_need_to_be_called_so(model):
    with pytest.raises(
        ValueError, match=r"num_decode 2 is not in 0\.\.1, the leading sequences of"
    ):
        SequenceBatch.from_lengths([1, 3, 1], cache=model.new_cache(3), num_decode=2)
    with pytest.raises(ValueError, match=r"0\.\.1, the leading sequences of some tokens"):
        SequenceBatch.from_lengths([3, 0], cache=model.new_cache(2), num_decode=2, is_verify=True)
