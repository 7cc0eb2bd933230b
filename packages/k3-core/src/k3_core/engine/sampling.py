"""Drawing the next token (report 5.4: sampling parameters belong to the request).

Legend: B rows, R of them that are drawn, V vocabulary, K likeliest tokens.

A row's result depends on its logits, its `Sampling`, and on (seed, position) alone: a counter-based
uniform number replaces generator state, so batching, suspension and the order of requests never
change an answer.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch

from k3_core.engine.protocol import Sampling, TokenLogprob

NUCLEUS = 64
"""Likeliest tokens of a row among which its nucleus is looked for before all are sorted."""


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


def choose_rows(
    logits_RV: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    masks: Sequence[torch.Tensor | None],
) -> list[int]:
    """The next token id of each row: greedy at temperature 0, else by inverse CDF.

    `positions` are the indices that the tokens will have in their sequences. With top-p the draw
    is from the fewest likeliest tokens whose probability reaches `top_p`. A mask (boolean [V])
    takes tokens out after the bias; one at least must be allowed. The rows are computed together,
    so that a GPU is waited for once, and once more with top-p.
    """
    if any(s.temperature > 0 and s.seed is None for s in samplings):
        raise ValueError("a sampled request needs a seed; the engine fixes one at submission")
    scores_RV, device = logits_RV.to(torch.float64, copy=True), logits_RV.device
    for row, (sampling, allowed_V) in enumerate(zip(samplings, masks, strict=True)):
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64)
            scores_RV[row].index_add_(0, ids, bias.to(device))
        if allowed_V is not None:
            scores_RV[row].masked_fill_(~allowed_V.to(device), -torch.inf)
    best_R = scores_RV.argmax(-1)
    if all(sampling.temperature == 0 for sampling in samplings):
        return best_R.tolist()

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device)[:, None]

    temperature_R1 = column([sampling.temperature for sampling in samplings])
    scores_RV -= scores_RV.amax(-1, keepdim=True)
    probs_RV = torch.softmax(scores_RV / torch.where(temperature_R1 > 0, temperature_R1, 1), dim=-1)
    cut = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if cut:
        top_p_C1 = column([samplings[row].top_p for row in cut])
        probs_RV[cut] = _keep_nucleus(probs_RV[cut], top_p_C1)
    cdf_RV = probs_RV.cumsum(-1)
    numbers = zip(samplings, positions, strict=True)
    points_R1 = column([uniform(s.seed or 0, position) for s, position in numbers])
    # right=True: a zero-probability token in front of the point is never chosen.
    drawn_R1 = torch.searchsorted(cdf_RV, points_R1 * cdf_RV[:, -1:], right=True)
    places_V = torch.arange(probs_RV.shape[1], device=device)
    last_R1 = torch.where(probs_RV > 0, places_V, 0).amax(-1, keepdim=True)
    drawn_R = torch.minimum(drawn_R1, last_R1)[:, 0]
    return torch.where(temperature_R1[:, 0] > 0, drawn_R, best_R).tolist()


def _keep_nucleus(probs_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Zeros but for the fewest likeliest tokens that reach `top_p`, of equal ones the first.

    A sort of the vocabulary takes as long as many layers, and is needed only by rows whose nucleus
    is large or ends among equal probabilities.
    """
    best_RK = probs_RV.topk(min(NUCLEUS, probs_RV.shape[1])).values
    num_R1 = (best_RK.cumsum(-1) - best_RK < top_p_R1).sum(-1, keepdim=True).clamp(min=1)
    least_R1 = best_RK.gather(1, num_R1 - 1)
    next_R1 = best_RK.gather(1, num_R1.clamp(max=best_RK.shape[1] - 1))
    kept_RV = torch.where(probs_RV < least_R1, 0, probs_RV)
    rest = (next_R1 >= least_R1)[:, 0].nonzero()[:, 0]
    if len(rest):
        kept_RV[rest] = _keep_nucleus_sorted(probs_RV[rest], top_p_R1[rest])
    return kept_RV


def _keep_nucleus_sorted(probs_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    sorted_RV, order_RV = probs_RV.sort(descending=True, stable=True)
    is_dropped_RV = sorted_RV.cumsum(-1) - sorted_RV >= top_p_R1
    return torch.zeros_like(probs_RV).scatter_(
        1, order_RV, sorted_RV.masked_fill(is_dropped_RV, 0.0)
    )


def _peaks(logits_BV: torch.Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row, or NaN, and its first place."""
    if logits_BV.device.type == "cpu" and logits_BV.dtype in (torch.float32, torch.float64):
        # NumPy searches in vector units, ten times as fast as torch on a CPU.
        rows_BV = logits_BV.detach().numpy()
        best_B = rows_BV.argmax(-1)
        return rows_BV[range(len(best_B)), best_B].tolist(), best_B.tolist()
    peak_B, place_B = logits_BV.max(dim=-1)
    return peak_B.tolist(), place_B.tolist()


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
    peaks, best = _peaks(logits_BV)
    is_sound = [math.isfinite(peak) for peak in peaks]
    chosen, masks = list(best), masks or [None] * len(samplings)
    drawn = [
        row
        for row, (sampling, mask) in enumerate(zip(samplings, masks, strict=True))
        if is_sound[row] and (sampling.temperature > 0 or sampling.logit_bias or mask is not None)
    ]
    if drawn:
        own = [(samplings[row], positions[row], masks[row]) for row in drawn]
        for row, token_id in zip(
            drawn, choose_rows(logits_BV[drawn], *zip(*own, strict=True)), strict=True
        ):
            chosen[row] = token_id
    num_top = max((sampling.top_logprobs for sampling in samplings), default=0)
    tokens = token_logprobs(logprobs_BV, chosen, num_top)
    return [
        token._replace(top=token.top[: sampling.top_logprobs]) if sound else None
        for token, sampling, sound in zip(tokens, samplings, is_sound, strict=True)
    ]
