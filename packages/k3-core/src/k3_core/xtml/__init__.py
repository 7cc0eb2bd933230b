"""XTML, the chat format of K3: rendering to segments and parsing of token ids (report 8.1)."""

from k3_core.xtml.events import (
    ContentDelta,
    MessageEnd,
    ParsedCall,
    ParsedMessage,
    ParseError,
    ParseEvent,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
    fold,
    joined,
)
from k3_core.xtml.json_text import ConversationError
from k3_core.xtml.parse import XtmlParser, parse_message
from k3_core.xtml.render import chat_segments, generation_prefix
from k3_core.xtml.segments import Segment
from k3_core.xtml.training import render_training

__all__ = [
    "ContentDelta",
    "ConversationError",
    "MessageEnd",
    "ParseError",
    "ParseEvent",
    "ParsedCall",
    "ParsedMessage",
    "ReasoningDelta",
    "Segment",
    "ToolArgsDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "XtmlParser",
    "chat_segments",
    "fold",
    "generation_prefix",
    "joined",
    "parse_message",
    "render_training",
]
