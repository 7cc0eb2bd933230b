"""Grammars that make a model call tools and write JSON as it was asked to (serving 0 and 5A)."""

from k3_serve.grammar.lark import GrammarError
from k3_serve.grammar.matcher import Compiler, GrammarConstraint
from k3_serve.grammar.turn import MAX_CALLS, Tool, Turn, turn_grammar

__all__ = [
    "MAX_CALLS",
    "Compiler",
    "GrammarConstraint",
    "GrammarError",
    "Tool",
    "Turn",
    "turn_grammar",
]
