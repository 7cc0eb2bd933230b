"""The simple engine's hold on a model: feeds rows of sequences through its packed forward.

Legend: T rows of the packed batch, R rows whose logits are wanted, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from k3_core.engine.protocol import Images
from k3_core.engine.sequence import Sequence

if TYPE_CHECKING:
    from k3_core.config import K3Config
    from k3_core.model import K3ForConditionalGeneration


class Runner:
    """A model in inference mode with a contiguous cache of `num_slots` sequences."""

    def __init__(self, model: K3ForConditionalGeneration, num_slots: int) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._cache = model.new_cache(num_slots)
        self.vocab_size = model.config.text.vocab_size
        self.max_length = model.config.text.max_position_embeddings

    def rows_of_images(self, images: Images | None) -> list[int]:
        """Rows that each image becomes in the place of its placeholder id."""
        return rows_of_images(self._model.config, images)

    def embed(self, sequence: Sequence) -> None:
        """Replaces the ids of a sequence with images by rows of features, for its prefill."""
        if sequence.request.images is not None:
            embed_images(self._model, sequence, sequence.request.images, self._device)

    def reset(self, sequence: Sequence) -> None:
        """Empties the sequence's slot."""
        self._cache.reset(sequence.slot)

    def feed(
        self, sequences: list[Sequence], start: int, stop: int | None, first_row: int = 0
    ) -> torch.Tensor:
        """Feeds rows start:stop of each sequence; logits_RV of the batch's rows >= first_row."""
        from k3_core.model.batch import SequenceBatch

        embeds_TD = sequences[0].embeds_TD
        ids_T = None
        if embeds_TD is None:
            pieces = [sequence.ids[start:stop] for sequence in sequences]
            lengths = [len(piece) for piece in pieces]
            ids_T = torch.tensor([i for piece in pieces for i in piece], device=self._device)
        else:
            embeds_TD = embeds_TD[start:stop]
            lengths = [len(embeds_TD)]
        slots = [sequence.slot for sequence in sequences]
        batch = SequenceBatch.from_lengths(
            lengths, device=self._device, cache=self._cache, slots=slots
        )
        rows_R = torch.arange(first_row, sum(lengths), device=self._device)
        output = self._model.forward_packed(
            ids_T, batch, inputs_embeds_TD=embeds_TD, logit_rows=rows_R
        )
        assert output.logits is not None
        return output.logits

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors into the weights of their names; on a bad one, none is copied."""
        copy_weights(self._model, tensors)


def rows_of_images(config: K3Config, images: Images | None) -> list[int]:
    """Rows that each image becomes in the place of its placeholder id (report 2.6)."""
    if images is None:
        return []
    if config.vision is None:
        raise ValueError("the request has images, but this model has no vision tower")
    height, width = config.vision.merge_kernel_size
    return [(h // height) * (w // width) for _, h, w in images.grid_thws.tolist()]


def embed_images(
    model: K3ForConditionalGeneration, sequence: Sequence, images: Images, device: torch.device
) -> None:
    """Gives a sequence with images its rows of features."""
    pixels, grid_thws = images
    ids_T = torch.tensor(sequence.ids, device=device)
    sequence.embeds_TD = model.embed_prompt(ids_T, pixels.to(device), grid_thws.to(device))


def copy_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors into the weights of their names; on a bad one, none is copied."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name not in state:
            raise ValueError(f"no weight is called {name!r}; the names are the checkpoint's")
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, not {tuple(state[name].shape)}"
            )
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
