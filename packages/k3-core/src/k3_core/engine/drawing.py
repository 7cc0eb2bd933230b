"""From logits to the sequences: the next token of each row, and the prompt's log-probabilities.

Legend: B rows, T rows of one prompt, V vocabulary.
"""

from __future__ import annotations

import torch

from k3_core.engine.protocol import TokenLogprob
from k3_core.engine.sampling import raw_logprobs, sample_rows, token_logprob
from k3_core.engine.sequence import Sequence


def draw(sequences: list[Sequence], logits_BV: torch.Tensor, version: int) -> int:
    """Draws and emits one token a sequence; the number of sequences that got one.

    A sequence with unsound logits, or whose constraint, parser or tokenizer fails, ends with an
    error, and no other does.
    """
    ready, rows, masks = [], [], []
    for row, sequence in enumerate(sequences):
        try:
            masks.append(sequence.allowed_mask(logits_BV.shape[-1]))
        except Exception as error:
            sequence.end("error", version, f"{type(error).__name__}: {error}")
        else:
            ready.append(sequence)
            rows.append(row)
    if not ready:
        return 0
    if len(ready) < len(sequences):
        logits_BV = logits_BV[torch.tensor(rows, device=logits_BV.device)]
    samplings = [sequence.request.sampling for sequence in ready]
    positions = [len(sequence.ids) for sequence in ready]
    tokens = sample_rows(logits_BV, samplings, positions, masks)
    return sum(_emit(s, token, version) for s, token in zip(ready, tokens, strict=True))


def _emit(sequence: Sequence, token: TokenLogprob | None, version: int) -> bool:
    if token is None:
        sequence.end("error", version, "the logits are not finite")
        return False
    try:
        sequence.emit(token, version)
    except Exception as error:
        sequence.end("error", version, f"{type(error).__name__}: {error}")
    return True


def score_prompt(
    sequence: Sequence, logits_TV: torch.Tensor, start: int
) -> list[TokenLogprob | None]:
    """Log-probabilities of ids start+1 .. start+T, by the rows before them."""
    targets = sequence.ids[start + 1 : start + 1 + len(logits_TV)]
    num_top = sequence.request.sampling.top_logprobs
    rows = raw_logprobs(logits_TV)[: len(targets)]
    return [token_logprob(row, i, num_top) for row, i in zip(rows, targets, strict=True)]
