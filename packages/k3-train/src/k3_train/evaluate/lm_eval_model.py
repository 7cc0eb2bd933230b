"""A model in this process for lm-eval (lm_eval 0.4), by the name "k3". Importing it needs lm_eval.

Every text is read from `[BOS]` on, as documents are in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from k3_core.engine import Request, Sampling
from k3_core.engine.simple import SimpleEngine
from k3_core.errors import K3Error
from k3_train.evaluate.base import Subject
from k3_train.evaluate.scoring import Piece, before_stops, joined, score
from k3_train.evaluate.subject import open_subject

MAX_TOKENS = 256
"""Of a continuation whose task sets no limit; lm-eval's own number."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the limit, the first one winning."""
SAMPLING = {"until", "do_sample", "temperature", "top_p", *LIMITS}


@register_model("k3")
class K3LM(LM):
    """lm-eval's interface over a `Subject`.

    pretrained: a subject, or what `k3 train evaluate` takes. batch_size and max_batch_size are
    lm-eval's and without effect: batches are made by numbers of tokens.
    """

    def __init__(
        self,
        pretrained: Subject | str,
        device: str = "auto",
        dtype: str = "float32",
        max_parallel: int = 16,
        seed: int = 0,
        batch_size: object = None,
        max_batch_size: object = None,
    ) -> None:
        super().__init__()
        self.subject = (
            pretrained
            if isinstance(pretrained, Subject)
            else open_subject(pretrained, device=device, dtype=dtype)
        )
        self.max_parallel, self.seed = max_parallel, seed

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether it is the greedy one) of each continuation."""
        pieces = [
            joined(self.subject, context, [continuation])[0]
            for context, continuation in (one.args for one in requests)
        ]
        return [(one.logprob, one.is_greedy) for one in score(self.subject, pieces)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each whole text, by lm-eval's windows of the model's context."""
        bos, encode = self.subject.tokenizer.bos_id, self.subject.tokenizer.encode
        texts = [
            list(rolling_windows([bos, *encode(text)], self.subject.context))
            for (text,) in (one.args for one in requests)
        ]
        scores = iter(score(self.subject, [piece for pieces in texts for piece in pieces]))
        return [sum(next(scores).logprob for _ in pieces) for pieces in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each context before the first of its stop strings.

        Greedy unless the task samples; then (seed, number of the request, position) draw.
        """
        tokenizer = self.subject.tokenizer
        asked = [
            Request(
                (tokenizer.bos_id, *tokenizer.encode(context)),
                self._sampling(options, number),
            )
            for number, (context, options) in enumerate(one.args for one in requests)
        ]
        with SimpleEngine(self.subject.model, tokenizer, max_batch=self.max_parallel) as engine:
            found = engine.generate(asked)
        texts = []
        for request, one in zip(asked, found, strict=True):
            if one.error is not None:
                raise K3Error(f"generation failed: {one.error}")
            ids = [token for token in one.token_ids if token not in tokenizer.stop_ids]
            texts.append(before_stops(tokenizer.decode(ids), request.sampling.stop))
        return texts

    def _sampling(self, options: Mapping[str, Any], number: int) -> Sampling:
        if unknown := sorted(set(options) - SAMPLING):
            raise K3Error(f"generation options {unknown} are unknown; known are {sorted(SAMPLING)}")
        until = options.get("until") or ()
        limits = [options[name] for name in LIMITS if options.get(name) is not None]
        is_sampled = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        return Sampling(
            max_tokens=int(limits[0]) if limits else MAX_TOKENS,
            temperature=float(options.get("temperature") or 1.0) if is_sampled else 0.0,
            top_p=float(options.get("top_p") or 1.0) if is_sampled else 1.0,
            seed=(self.seed << 32) + number,
            stop_ids=tuple(self.subject.tokenizer.stop_ids),
            stop=(until,) if isinstance(until, str) else tuple(until),
        )


def rolling_windows(ids: Sequence[int], length: int) -> Iterator[Piece]:
    """Pieces that score ids[1:], each once, from at most `length` ids.

    Every window but the last goes on with one id of context, the last one is filled up to `length`.
    """
    for start in range(1, len(ids), length):
        stop = min(start + length, len(ids))
        first = max(0, stop - 1 - length)
        yield Piece(ids[first:stop], start - first)
