"""Tokenizer of K3: byte pair encoding over tiktoken ranks plus 256 special slots.

Architecture 7. `K3Tokenizer` serves the released vocabulary and every smaller one alike.
"""

from k3_core.tokenizer.k3 import K3Tokenizer
from k3_core.tokenizer.ranks import TokenizerError
from k3_core.tokenizer.utf8 import Utf8Stream

__all__ = ["K3Tokenizer", "TokenizerError", "Utf8Stream"]
