"""Test doubles of the engine: one that says what it is told, and one that is stepped by hand.

`ScriptedEngine` is for everything above an engine: given tokens, one by one or in spans, with
given log-probabilities, ends, failures and delays. `SteppedEngine` is the real engine without its
thread, `tiny_model` a model and `GuessDraft` a draft small enough for it; those import torch on
first use.
"""

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes
from k3_serve.testing.scripted import LOGPROB, Script, ScriptedEngine

if TYPE_CHECKING:
    from k3_serve.testing.guess import GuessDraft
    from k3_serve.testing.stepped import SteppedEngine, tiny_model
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "GuessDraft": "k3_serve.testing.guess",
            "SteppedEngine": "k3_serve.testing.stepped",
            "tiny_model": "k3_serve.testing.stepped",
        },
    )

__all__ = ["LOGPROB", "GuessDraft", "Script", "ScriptedEngine", "SteppedEngine", "tiny_model"]
