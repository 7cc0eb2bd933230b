"""Drawing the next token (report 5.4: sampling parameters belong to the request).

Legend: B rows, V vocabulary. A row's result depends on its logits, its `Sampling`, and on
(seed, position) alone: a counter-based uniform number replaces generator state, so batching,
suspension and the order of requests never change an answer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from k3_core.engine.protocol import Sampling, TokenLogprob


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def raw_logprobs(logits_BV: torch.Tensor) -> torch.Tensor:
    """log softmax of the raw logits, in float32 (float64 logits keep their precision)."""
    wide_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    return torch.log_softmax(wide_BV, dim=-1)


def token_logprobs(
    logprobs_BV: torch.Tensor, ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """The log-probability of one token a row and the row's `num_top` likeliest, best first."""
    ids_B1 = torch.tensor(list(ids), dtype=torch.int64, device=logprobs_BV.device)[:, None]
    values = logprobs_BV.gather(1, ids_B1)[:, 0].tolist()
    if not num_top:
        return [TokenLogprob(*pair) for pair in zip(ids, values, strict=True)]
    top = logprobs_BV.topk(min(num_top, logprobs_BV.shape[1]))
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token_id, value, tuple(zip(*pair, strict=True)))
        for token_id, value, pair in zip(ids, values, tops, strict=True)
    ]


def choose(
    logits_V: torch.Tensor,
    sampling: Sampling,
    position: int,
    allowed_V: torch.Tensor | None = None,
) -> int:
    """The next token id of one row: greedy at temperature 0, else by inverse CDF.

    `position` is the index that the token will have in its sequence. With top-p the draw is
    from the fewest likeliest tokens whose probability reaches `top_p`. `allowed_V` masks tokens
    out after the bias; one at least must be allowed.
    """
    scores_V = logits_V.double()
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits_V.device)
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64)
        scores_V = scores_V.index_add(0, ids, bias.to(logits_V.device))
    if allowed_V is not None:
        scores_V = scores_V.masked_fill(~allowed_V.to(scores_V.device), -torch.inf)
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    if sampling.seed is None:
        raise ValueError("a sampled request needs a seed; the engine fixes one at submission")
    probs_V = torch.softmax((scores_V - scores_V.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        probs_V = _keep_nucleus(probs_V, sampling.top_p)
    cdf_V = probs_V.cumsum(0)
    point = uniform(sampling.seed, position) * cdf_V[-1]
    # right=True: a zero-probability token in front of the point is never chosen.
    token_id = int(torch.searchsorted(cdf_V, point, right=True))
    return min(token_id, int(probs_V.nonzero()[-1]))


def _keep_nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    is_dropped_V = sorted_V.cumsum(0) - sorted_V >= top_p
    return probs_V.index_fill(0, order_V[is_dropped_V], 0.0)


def sample_rows(
    logits_BV: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    masks: Sequence[torch.Tensor | None] | None = None,
) -> list[TokenLogprob | None]:
    """One token per row; None for a row with NaN or infinite logits, which fails alone.

    -inf is a masked token and is allowed beside finite ones. `masks` are the rows' allowed
    tokens, boolean [V], None for all.
    """
    logprobs_BV = raw_logprobs(logits_BV)
    # NaN and +inf both surface in the maximum; the likeliest token is what plain greedy takes.
    peak_B, best_B = logits_BV.max(dim=-1)
    is_sound, best = torch.isfinite(peak_B).tolist(), best_B.tolist()
    masks = masks or [None] * len(samplings)
    chosen = []
    for row, (sampling, position, mask) in enumerate(zip(samplings, positions, masks, strict=True)):
        is_plain = sampling.temperature == 0 and not sampling.logit_bias and mask is None
        if is_plain or not is_sound[row]:
            chosen.append(best[row])
        else:
            chosen.append(choose(logits_BV[row], sampling, position, mask))
    num_top = max((sampling.top_logprobs for sampling in samplings), default=0)
    tokens = token_logprobs(logprobs_BV, chosen, num_top)
    return [
        token._replace(top=token.top[: sampling.top_logprobs]) if sound else None
        for token, sampling, sound in zip(tokens, samplings, is_sound, strict=True)
    ]
