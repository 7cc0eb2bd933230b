"""Streaming parser of the model's XTML output (report 8.1, serving 4a and 5A).

It reads token ids, not text: a control token and the same characters typed as text have different
ids, so nothing has to be held back and no text can be taken for structure. The state is plain
data; events of any output, however malformed, come without an exception. Rules for what leaves
the grammar, each announced by a `ParseError`:

- a known element in the wrong place closes what is in its way (an opener inside a close tag too);
- a known closer that closes nothing is dropped;
- everything else, an unknown element say, is passed on literally to the current channel, and text
  between elements goes to the content;
- a marker, value or call that the end cuts off is passed on as far as it came.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from k3_core.tokenizer.utf8 import Utf8Stream
from k3_core.xtml import grammar
from k3_core.xtml.events import (
    ContentDelta,
    MessageEnd,
    ParsedMessage,
    ParseError,
    ParseEvent,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
    fold,
)

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


@dataclass
class _State:
    path: list[str]  # open elements of the assistant body, outermost first
    channel: int  # number of the last channel in grammar.CHANNELS
    marker: str = ""  # "open" or "close" while the header of such a marker is read
    header: list[str] = field(default_factory=list)  # its text so far
    pending: str = ""  # bytes of an unfinished character, in hexadecimal
    is_stray: bool = False  # whether text stands between the elements at this point
    is_open: bool = True  # until the message is closed
    num_calls: int = 0
    keys: list[str] = field(default_factory=list)  # of the arguments of the current call
    has_json: bool = False  # whether the current call has a json element
    kind: str = ""  # type of the current argument
    value: list[str] = field(default_factory=list)  # its text so far, unless it is a string
    is_done: bool = False


class XtmlParser:
    """Parses one assistant turn that follows a generation prefix; `thinking` says which prefix."""

    def __init__(self, tokenizer: "K3Tokenizer", thinking: bool = True) -> None:
        channel = 0 if thinking else 1
        self._state = _State([grammar.CHANNELS[channel]], channel)
        self._bind(tokenizer)

    @classmethod
    def from_state(cls, tokenizer: "K3Tokenizer", state: dict[str, Any]) -> "XtmlParser":
        """Continue from what `state_dict` returned."""
        parser = cls.__new__(cls)
        parser._state = _State(**state)
        parser._bind(tokenizer)
        return parser

    def state_dict(self) -> dict[str, Any]:
        """The whole state as data that JSON can hold."""
        return asdict(self._state) | {"pending": self._utf8.pending.hex()}

    def feed(self, token_id: int) -> list[ParseEvent]:
        """Events of the next token; none after the end of the message."""
        if self._state.is_done:
            return []
        control = self._controls.get(token_id)
        if control is None:
            self._text(self._utf8.feed(self._token_bytes(token_id)))
        else:
            self._text(self._utf8.flush())
            control()
        return self._take()

    def finish(self) -> list[ParseEvent]:
        """Events of the end of the output when no stop token came; none when one did."""
        if self._state.is_done:
            return []
        self._text(self._utf8.flush())
        marker, header = self._end_marker()
        if marker:
            self._literal(f"<|{marker}|>{header}")
        self._end(is_complete=False)
        return self._take()

    def _bind(self, tokenizer: "K3Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = Utf8Stream(bytes.fromhex(self._state.pending))
        self._events: list[ParseEvent] = []
        self._controls: dict[int, Callable[[], None]] = {
            tokenizer.open_id: lambda: self._begin("open"),
            tokenizer.close_id: lambda: self._begin("close"),
            tokenizer.sep_id: self._sep,
        } | dict.fromkeys(tokenizer.stop_ids, self._stop)

    def _take(self) -> list[ParseEvent]:
        events, self._events = self._events, []
        return events

    def _error(self, reason: str) -> None:
        self._events.append(ParseError(reason))

    def _token_bytes(self, token_id: int) -> bytes:
        try:
            spelling = self._tokenizer.token_bytes(token_id)
        except ValueError as error:
            self._error(str(error))
            return "\ufffd".encode()
        if token_id >= self._tokenizer.num_base_tokens:
            self._error(f"special token {spelling.decode()} has no place in an answer")
        return spelling

    # --- text -------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        state = self._state
        place = state.path[-1] if state.path else ""
        if state.marker:
            state.header.append(text)
        elif not text:
            return
        elif place == "think":
            self._events.append(ReasoningDelta(text))
        elif place == "response":
            self._events.append(ContentDelta(text))
        elif place == "json" or (place == "argument" and state.kind == "string"):
            escaped = text if place == "json" else json.dumps(text, ensure_ascii=False)[1:-1]
            self._arguments(escaped)
        elif place == "argument":
            state.value.append(text)
        else:
            self._stray(text)

    def _stray(self, text: str) -> None:
        if not self._state.is_stray:
            text = text.lstrip()
            if not text:
                return
            self._error("text between elements")
            self._state.is_stray = True
        self._events.append(ContentDelta(text))

    def _literal(self, text: str) -> None:
        self._error(f"{text[:80]!r} has no meaning here")
        self._text(text)

    def _arguments(self, fragment: str) -> None:
        self._events.append(ToolArgsDelta(self._state.num_calls - 1, fragment))

    # --- markers ----------------------------------------------------------------------------

    def _begin(self, marker: str) -> None:
        self._elided_sep()
        self._state.marker = marker

    def _sep(self) -> None:
        marker, header = self._end_marker()
        if marker:
            self._apply(marker, header, "<|sep|>")
        else:
            self._literal("<|sep|>")

    def _stop(self) -> None:
        self._elided_sep()
        if not self._state.is_done:
            self._end(is_complete=True)

    def _elided_sep(self) -> None:
        marker, header = self._end_marker()
        if marker:
            self._error(f"<|sep|> is missing after <|{marker}|>{header[:80]}")
            self._apply(marker, header, "")

    def _end_marker(self) -> tuple[str, str]:
        state = self._state
        marker, header = state.marker, "".join(state.header)
        state.marker, state.header = "", []
        return marker, header

    def _apply(self, marker: str, text: str, sep: str) -> None:
        header = grammar.read_header(text)
        accept = self._open if marker == "open" else self._close
        if header is None or not accept(header):
            self._literal(f"<|{marker}|>{text}{sep}")
        else:
            self._state.is_stray = False

    def _open(self, header: grammar.Header) -> bool:
        """Enter the element, closing what is in its way; false when the opener means nothing."""
        tag, attributes = header
        state = self._state
        if tag == "message":
            self._error("another message begins inside the answer")
            self._end(is_complete=False)
            return True
        if tag not in grammar.PATHS or grammar.IDENTIFIERS.get(tag, "") not in ("", *attributes):
            return False
        if not self._fits_call(tag):
            return False
        if not state.is_open:
            self._error(f"{tag} begins after the end of the message")
        parents = grammar.PATHS[tag][:-1]
        if state.path != parents:
            self._error(f"{tag} begins inside {'.'.join(state.path) or 'message'}")
        while state.path != parents[: len(state.path)]:
            self._leave()
        if tag == "call" and not state.path:
            self._enter("tools", {})
        self._enter(tag, attributes)
        return True

    def _fits_call(self, tag: str) -> bool:
        state = self._state
        if tag == "argument":
            return "call" in state.path and not state.has_json
        if tag == "json":
            return "call" in state.path and not state.has_json and not state.keys
        return True

    def _close(self, header: grammar.Header) -> bool:
        """Leave the element and all inside it; false when the closer means nothing."""
        tag, attributes = header
        state = self._state
        if attributes or tag not in ("message", *grammar.PATHS):
            return False
        if tag == "message":
            if state.path or not state.is_open:
                self._error(f"message closes inside {'.'.join(state.path) or 'nothing'}")
            state.is_open = False
        elif tag not in state.path:
            self._error(f"{tag} closes inside {'.'.join(state.path) or 'message'}")
            return True
        elif tag != state.path[-1]:
            self._error(f"{tag} closes before {state.path[-1]}")
        while state.path and (tag == "message" or tag in state.path):
            self._leave()
        return True

    # --- elements ---------------------------------------------------------------------------

    def _enter(self, tag: str, attributes: dict[str, str]) -> None:
        state = self._state
        state.path.append(tag)
        if tag in grammar.CHANNELS:
            channel = grammar.CHANNELS.index(tag)
            if channel != state.channel + 1:
                self._error(f"{tag} comes after {grammar.CHANNELS[state.channel]}")
            state.channel = channel
        elif tag == "call":
            self._enter_call(attributes)
        elif tag == "argument":
            self._enter_argument(attributes)
        else:
            state.has_json = True
            self._error("the arguments are given as raw text")

    def _enter_call(self, attributes: dict[str, str]) -> None:
        state = self._state
        index = state.num_calls
        state.num_calls, state.keys, state.has_json = index + 1, [], False
        # Calls are told apart by their order; models have got the written number wrong.
        if attributes.get("index") != str(index + 1):
            self._error(f"call {index + 1} has index {attributes.get('index')!r}")
        self._events.append(ToolCallStart(index, attributes["tool"]))

    def _enter_argument(self, attributes: dict[str, str]) -> None:
        state = self._state
        key = attributes["key"]
        if key in state.keys:
            self._error(f"argument {key!r} is given twice")
        if "type" not in attributes:
            self._error(f"argument {key!r} has no type")
        state.kind, state.value = attributes.get("type", "string"), []
        start = ", " if state.keys else "{"
        state.keys.append(key)
        quote = '"' if state.kind == "string" else ""
        self._arguments(f"{start}{json.dumps(key, ensure_ascii=False)}: {quote}")

    def _leave(self) -> None:
        state = self._state
        tag = state.path.pop()
        if tag == "argument" and state.kind == "string":
            self._arguments('"')
        elif tag == "argument":
            value, error = grammar.argument_json("".join(state.value), state.kind)
            if error:
                self._error(error)
            self._arguments(value)
        elif tag == "call":
            if not state.has_json:
                self._arguments("}" if state.keys else "{}")
            self._events.append(ToolCallEnd(state.num_calls - 1))

    def _end(self, is_complete: bool) -> None:
        """End the message where it is: an unfinished call stays unfinished, never made whole."""
        state = self._state
        if state.is_open:
            self._error(f"the output ends inside {'.'.join(state.path) or 'message'}")
        if state.path[-1:] == ["argument"] and state.kind != "string" and state.value:
            self._arguments("".join(state.value))
        state.is_done = True
        self._events.append(MessageEnd(is_complete))


def parse_message(
    tokenizer: "K3Tokenizer", ids: Iterable[int], thinking: bool = True
) -> ParsedMessage:
    """The message of the ids that follow a generation prefix."""
    parser = XtmlParser(tokenizer, thinking)
    events = [event for token_id in ids for event in parser.feed(token_id)]
    return fold(events + parser.finish())
