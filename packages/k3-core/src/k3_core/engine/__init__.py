"""Generation: the `Engine` protocol and the simplest engine that keeps it (report 5.4).

`SimpleEngine` is imported on first use, so that the protocol costs no torch import.
"""

from typing import TYPE_CHECKING

from k3_core.engine.handle import EventStream, fold_events
from k3_core.engine.protocol import (
    Channel,
    Completion,
    Constraint,
    Engine,
    EngineBusy,
    Event,
    FinishReason,
    Handle,
    Images,
    Request,
    Sampling,
    Stats,
    TokenLogprob,
)
from k3_core.engine.stops import StopMatcher
from k3_core.engine.suspended import Suspended
from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3_core.engine.simple import SimpleEngine
else:
    __getattr__ = lazy_attributes(__name__, {"SimpleEngine": "k3_core.engine.simple"})

__all__ = [
    "Channel",
    "Completion",
    "Constraint",
    "Engine",
    "EngineBusy",
    "Event",
    "EventStream",
    "FinishReason",
    "Handle",
    "Images",
    "Request",
    "Sampling",
    "SimpleEngine",
    "Stats",
    "StopMatcher",
    "Suspended",
    "TokenLogprob",
    "fold_events",
]
