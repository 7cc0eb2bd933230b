"""The MTP layer: teacher-forced and step by step agree; absent when there are none."""

import dataclasses

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch


def build(golden, **changes):
    config = K3Config.from_file(golden("text_tiny"))
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, **changes))
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))
    model = model.double()
    model.bind_ops("cpu", "float64")
    return model


@pytest.mark.parametrize("is_shared", [True, False])
def test_step_by_step_equals_teacher_forced(golden, is_shared):
    model = build(golden, num_nextn_predict_layers=1, mtp_share_embeddings=is_shared)
    ids = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(1))
    next_ids = ids.roll(-1)
    with torch.no_grad():
        batch = SequenceBatch.from_lengths([17])
        mix = model.forward_packed(ids, batch).mix_TD
        whole, _ = model.mtp_forward(next_ids, mix, batch)
        cache, steps = model.new_cache(1), []
        for t in range(17):
            one = SequenceBatch.from_lengths([1], cache=cache, starts=[t])
            steps.append(model.mtp_forward(next_ids[t : t + 1], mix[t : t + 1], one)[0])
    torch.testing.assert_close(torch.cat(steps), whole, atol=1e-9, rtol=1e-9)


def test_the_embedding_at_position_zero_is_not_read(golden):
    model = build(golden, num_nextn_predict_layers=1)
    ids = torch.arange(6)
    batch = SequenceBatch.from_lengths([3, 3])
    with torch.no_grad():
        mix = model.forward_packed(ids, batch).mix_TD
        base, _ = model.mtp_forward(ids, mix, batch)
        for position, is_read in ((0, False), (1, True), (3, False), (5, True)):
            changed = ids.clone()
            changed[position] = 99
            logits, _ = model.mtp_forward(changed, mix, batch)
            assert torch.equal(logits, base) is not is_read


def test_the_loss_is_on_the_token_after_the_next(golden):
    """Against the logits of `mtp_forward` and a hand-made target."""
    model = build(golden, num_nextn_predict_layers=1)
    ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(3))
    labels = torch.cat((ids[1:5], torch.tensor([-100]), ids[6:], torch.tensor([-100])))
    batch = SequenceBatch.from_lengths([5, 7])
    with torch.no_grad():
        loss, metrics = model.training_loss(ids, labels, batch, mtp_weight=0.25)
        out = model.forward_packed(ids, batch)
        next_ids = torch.cat((ids[1:5], ids[:1], ids[6:], ids[:1]))
        logits, _ = model.mtp_forward(next_ids, out.mix_TD, batch)
    picked = [0, 1, 2, 5, 6, 7, 8, 9]
    targets = [int(ids[t + 2]) for t in picked]
    mtp = torch.nn.functional.cross_entropy(logits[picked], torch.tensor(targets))
    rows = [t for t in range(12) if labels[t] >= 0]
    plain = torch.nn.functional.cross_entropy(out.logits[rows], labels[rows])
    torch.testing.assert_close(metrics["mtp_loss"], mtp)
    torch.testing.assert_close(loss, plain + 0.25 * mtp)


def test_without_mtp_layers_there_is_nothing_of_them(golden):
    model = build(golden, num_nextn_predict_layers=0)
    names = model.state_dict()
    assert not [n for n in names if "layers.9." in n or "eh_proj" in n or "shared_head" in n]
    with pytest.raises(ValueError, match="the model has 0 of them"):
        model.mtp_forward(torch.arange(3), torch.zeros(3, 64), SequenceBatch.from_lengths([3]))
