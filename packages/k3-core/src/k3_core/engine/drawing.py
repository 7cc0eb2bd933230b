"""From logits to the sequences: the next token of each row, and the prompt's log-probabilities.

Legend: B rows, T rows of one prompt, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3_core.engine.protocol import TokenLogprob
from k3_core.engine.sampling import raw_logprobs, sample_rows, token_logprobs
from k3_core.engine.sequence import Sequence


class Drawn(NamedTuple):
    """How many sequences got a token, and how many had logits that were not finite."""

    num_tokens: int
    num_unsound: int


def draw(sequences: list[Sequence], logits_BV: torch.Tensor, version: int) -> Drawn:
    """Draws and emits one token a sequence; one that asked for no token ends.

    A sequence with unsound logits, or whose constraint, parser or tokenizer fails, ends with an
    error, and no other does.
    """
    ready, rows, masks = [], [], []
    for row, sequence in enumerate(sequences):
        if sequence.max_tokens == 0:
            sequence.end("length", version)
            continue
        try:
            masks.append(sequence.allowed_mask(logits_BV.shape[-1]))
        except Exception as error:
            sequence.end("error", version, f"{type(error).__name__}: {error}")
        else:
            ready.append(sequence)
            rows.append(row)
    if not ready:
        return Drawn(0, 0)
    if len(ready) < len(sequences):
        logits_BV = logits_BV[torch.tensor(rows, device=logits_BV.device)]
    samplings = [sequence.request.sampling for sequence in ready]
    positions = [len(sequence.ids) for sequence in ready]
    tokens = sample_rows(logits_BV, samplings, positions, masks)
    for sequence, token in zip(ready, tokens, strict=True):
        _emit(sequence, token, version)
    num_unsound = tokens.count(None)
    return Drawn(len(tokens) - num_unsound, num_unsound)


def _emit(sequence: Sequence, token: TokenLogprob | None, version: int) -> None:
    if token is None:
        sequence.end("error", version, "the logits are not finite")
        return
    try:
        sequence.emit(token, version)
    except Exception as error:
        sequence.end("error", version, f"{type(error).__name__}: {error}")


def score_prompt(
    sequence: Sequence, logits_TV: torch.Tensor, start: int
) -> list[TokenLogprob | None]:
    """Log-probabilities of ids start+1 .. start+T, by the rows before them."""
    targets = sequence.ids[start + 1 : start + 1 + len(logits_TV)]
    num_top = sequence.request.sampling.top_logprobs
    return list(token_logprobs(raw_logprobs(logits_TV)[: len(targets)], targets, num_top))
