"""Pictures in a packed batch: the same as each sequence alone, before its placeholders grow."""

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_core.model.batch import PackedImages
from k3_core.vision import VisionInputError

GRIDS = torch.tensor([[1, 4, 2], [4, 2, 2], [1, 2, 2]])
MEDIA = 256 + 21


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(0)
    config = K3Config.preset("k3-test-vision")
    return K3ForConditionalGeneration(config, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def pixels():
    generator = torch.Generator().manual_seed(1)
    counts = GRIDS.prod(1).tolist()
    patches = torch.rand(sum(counts), 3, 14, 14, generator=generator, dtype=torch.float64)
    return list((2 * patches - 1).split(counts))


# Two positions for the first picture, one for the others; ids as they are packed.
DOCUMENTS = [[1, 2, 3, 4], [5, MEDIA, MEDIA, 6, 7], [8, MEDIA, 9, 10, MEDIA, 11, 12]]
ITEMS = [[], [0], [1, 2]]


def test_a_packed_batch_equals_its_sequences_alone(model, pixels):
    ids = torch.tensor([one for document in DOCUMENTS for one in document])
    images = PackedImages(torch.cat(pixels), GRIDS)
    lengths = [len(one) for one in DOCUMENTS]
    packed = SequenceBatch.from_lengths(lengths, images=images)
    together = model.forward_packed(ids, packed).logits.split(lengths)
    for document, items, logits in zip(DOCUMENTS, ITEMS, together, strict=True):
        short = [one for i, one in enumerate(document) if one != MEDIA or document[i - 1] != MEDIA]
        pictures = {}
        if items:
            pictures = {
                "pixel_values": torch.cat([pixels[i] for i in items]),
                "grid_thws": GRIDS[items],
            }
        alone = model(torch.tensor([short]), **pictures).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


def test_gradients_reach_both_towers_and_the_projector(model, pixels):
    ids = torch.tensor(DOCUMENTS[1])
    packed = SequenceBatch.from_lengths([len(ids)], images=PackedImages(pixels[0], GRIDS[:1]))
    labels = torch.tensor([-100, -100, 6, 7, -100])
    loss, _ = model.training_loss(ids, labels, packed)
    names = [name for name, _ in model.named_parameters() if "e_score" not in name]
    grads = torch.autograd.grad(
        loss, [model.get_parameter(name) for name in names], allow_unused=True
    )
    reached = {
        name.split(".")[0]
        for name, g in zip(names, grads, strict=True)
        if g is not None and g.any()
    }
    assert reached == {"language_model", "vision_tower", "mm_projector"}


def test_pictures_that_do_not_fit_the_ids_or_the_model_are_refused(model, pixels):
    ids = torch.tensor(DOCUMENTS[1][1:])
    images = PackedImages(pixels[1], GRIDS[1:2])
    packed = SequenceBatch.from_lengths([len(ids)], images=images)
    with pytest.raises(VisionInputError, match=r"2 placeholders .* for 1 positions of 1 images"):
        model.forward_packed(ids, packed)
    blind = K3ForConditionalGeneration(K3Config.preset("k3-test"))
    with pytest.raises(ValueError, match="no vision tower"):
        blind.forward_packed(ids, packed)
