"""XTML, the chat format of K3: rendering to segments and parsing of token ids (report 8.1)."""

from k3_core.xtml.render import chat_segments
from k3_core.xtml.segments import Segment
from k3_core.xtml.training import render_training

__all__ = ["Segment", "chat_segments", "render_training"]
