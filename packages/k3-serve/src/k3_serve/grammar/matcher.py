"""A grammar at work: which tokens may come next (the engine's `Constraint` protocol)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from k3_serve.api.usage import spelling
from k3_serve.grammar.lark import GrammarError

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

_NUM_KEPT = 64


class GrammarConstraint:
    """Follows one output through a grammar. Of one request; `clone` for another with the same."""

    def __init__(self, matcher: LLMatcher, end_id: int, is_complete: bool = False) -> None:
        self._matcher = matcher
        self._end_id = end_id
        self._is_complete = is_complete

    def allowed_mask(self, vocab_size: int) -> torch.Tensor:
        """The tokens that may come next, as booleans over the vocabulary.

        Ids from the tokenizer's end on, which a model may have for padding, are never allowed.
        Raises ValueError when the grammar has become too complex to go on.
        """
        bias = bytearray(self._matcher.compute_logit_bias())
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on: {problem_of(self._matcher)}")
        mask = torch.frombuffer(bias, dtype=torch.uint8)[:vocab_size] != 0
        return torch.nn.functional.pad(mask, (0, vocab_size - len(mask)))

    def advance(self, token_id: int) -> None:
        """Takes the token that was chosen. Raises ValueError for one that is not allowed."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} is not in the grammar: {problem_of(self._matcher)}")
        self._is_complete = token_id == self._end_id

    @property
    def is_complete(self) -> bool:
        """Whether the turn is over, its end-of-message token included."""
        return self._is_complete

    def clone(self) -> GrammarConstraint:
        """An independent copy in the same state."""
        return GrammarConstraint(self._matcher.deep_copy(), self._end_id, self._is_complete)

    def accepts(self, token_ids: list[int]) -> bool:
        """Advances by the tokens when all are allowed; else it says so, and is of no more use."""
        try:
            for token_id in token_ids:
                self.advance(token_id)
        except ValueError:
            return False
        return True


def problem_of(matcher: LLMatcher) -> str:
    """What is wrong, in a line: after it a failure lists parts of the schema and of itself."""
    return " ".join(matcher.get_error().partition("\n")[0].split())[:300]


class Compiler:
    """Compiles grammars for one tokenizer; the last ones are kept. Safe to use from threads.

    llguidance bounds what a grammar may cost, in size and in steps: a pathological schema is
    refused after a few seconds at most.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._source = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, GrammarConstraint] = OrderedDict()

    def compile(self, lark: str) -> GrammarConstraint:
        """A constraint at the beginning of the grammar; GrammarError when there is none."""
        with self._lock:
            if self._tokenizer is None:  # takes a while for a large vocabulary: on first use
                wrapper = TokenizerWrapper(_Vocabulary(self._source))
                self._tokenizer = LLTokenizer(wrapper, n_vocab=self._source.vocab_size)
            kept = self._kept.get(lark)
            if kept is not None:
                self._kept.move_to_end(lark)
                return kept.clone()
        constraint = self._build(self._tokenizer, lark)
        with self._lock:
            self._kept[lark] = constraint
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return constraint.clone()

    def _build(self, tokenizer: LLTokenizer, lark: str) -> GrammarConstraint:
        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"the schema cannot be enforced: {problem_of(matcher)}")
        return GrammarConstraint(matcher, self._source.end_of_msg_id)


class _Vocabulary:
    """The tokenizer as llguidance asks for it. An id without a token is never allowed."""

    bos_token_id = None

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.end_of_msg_id
        self.special_token_ids = sorted(tokenizer.special_ids.values())
        self.tokens = [spelling(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)
