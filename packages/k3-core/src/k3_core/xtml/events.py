"""Events of a parsed assistant turn, and the message that they fold into (serving 2 and 4c).

A streamed and a whole answer cannot differ: the whole one is the fold of the streamed events.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the response channel, or text that stands where none belongs."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of the message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgsDelta:
    """More of the call's arguments; the fragments of a finished call join to a JSON object."""

    index: int
    json_fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is closed: its arguments are whole. A call cut off by the end has no such event."""

    index: int


@dataclass(frozen=True, slots=True)
class ParseError:
    """The output left the grammar here; what it still means follows as ordinary events."""

    reason: str


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """Nothing follows. `is_complete` when a stop token came, false when the output was cut off."""

    is_complete: bool


ParseEvent = (
    ReasoningDelta
    | ContentDelta
    | ToolCallStart
    | ToolArgsDelta
    | ToolCallEnd
    | ParseError
    | MessageEnd
)


@dataclass
class ParsedCall:
    """One call: `arguments` is JSON text; when not `is_complete` it is a prefix of it."""

    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class ParsedMessage:
    """A whole assistant turn. `errors` are the reasons of all parse errors, in order."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_complete: bool = False


def joined(events: Iterable[ParseEvent]) -> list[ParseEvent]:
    """The same events with text that goes on as one delta."""
    found: list[ParseEvent] = []
    for event in events:
        match found[-1:], event:
            case [ReasoningDelta(before)], ReasoningDelta(text):
                found[-1] = ReasoningDelta(before + text)
            case [ContentDelta(before)], ContentDelta(text):
                found[-1] = ContentDelta(before + text)
            case [ToolArgsDelta(first, before)], ToolArgsDelta(index, text) if first == index:
                found[-1] = ToolArgsDelta(index, before + text)
            case _:
                found.append(event)
    return found


def fold(events: Iterable[ParseEvent]) -> ParsedMessage:
    """The message that the events of one turn add up to."""
    message = ParsedMessage()
    reasoning: list[str] = []
    content: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, name):
                message.tool_calls.append(ParsedCall(name))
                arguments.append([])
            case ToolArgsDelta(index, fragment):
                arguments[index].append(fragment)
            case ToolCallEnd(index):
                message.tool_calls[index].is_complete = True
            case ParseError(reason):
                message.errors.append(reason)
            case MessageEnd(is_complete):
                message.is_complete = is_complete
    message.reasoning, message.content = "".join(reasoning), "".join(content)
    for call, fragments in zip(message.tool_calls, arguments, strict=True):
        call.arguments = "".join(fragments)
    return message
