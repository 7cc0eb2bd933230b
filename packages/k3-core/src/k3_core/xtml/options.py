"""Option messages: tool declarations, thinking effort, tool choice, response format.

Architecture 8, points 1, 2, 4 and 5. The sentences are the released ones to the letter.
"""

from collections.abc import Mapping
from typing import Any

from k3_core.xtml.json_text import ConversationError, json_text
from k3_core.xtml.segments import Segment, message, plain

EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
# "medium" is advertised by the released sentence although the model has no such level.
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def tool_declaration(
    tools: list[dict[str, Any]], declared: set[str], is_new: bool
) -> list[Segment]:
    """The message that declares tools; `declared` holds the names so far and takes the new ones.

    `is_new` selects the wording for tools that come in the middle of a conversation.
    """
    if not isinstance(tools, list):
        raise ConversationError(f"tools is a {type(tools).__name__}, not a list")
    for position, tool in enumerate(tools):
        name = _tool_name(tool, position)
        if name in declared:
            raise ConversationError(
                f"tool {name!r} is declared twice; give every tool its own name"
            )
        declared.add(name)
    return _option(
        "tool-declare", f"{_NEW_TOOLS if is_new else _TOOLS}\n\n{_fenced(tools, 'tools')}"
    )


def thinking_effort(effort: str) -> list[Segment]:
    """The message that names the effort level. Raises ConversationError unless low, high or max."""
    if effort not in EFFORTS:
        raise ConversationError(
            f"thinking_effort {effort!r} is not one of {', '.join(EFFORTS)}, or None"
        )
    return _option("thinking-effort", _EFFORT.format(effort))


def tool_choice(choice: str | None) -> list[Segment]:
    """The message for "required" or "none"; nothing for "auto" and None."""
    if choice is not None and choice not in TOOL_CHOICES:
        raise ConversationError(f"tool_choice {choice!r} is not one of {', '.join(TOOL_CHOICES)}")
    if choice is None or choice == "auto":
        return []
    first = f"The system is invoked with `tool_choice={choice}`."
    return _option("tool-choice", f"{first}\n{_TOOL_CHOICE[choice]}")


def response_format(wanted: Mapping[str, Any] | None) -> list[Segment]:
    """The message for json_object or json_schema; nothing for text and None."""
    if wanted is None:
        return []
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind not in RESPONSE_FORMATS:
        raise ConversationError(
            f"response_format type {kind!r} is not one of {', '.join(RESPONSE_FORMATS)}"
        )
    if kind == "text":
        return []
    body = _RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        body += _SCHEMA + _fenced(_schema(wanted), "the schema")
    return _option("response-format", body)


def _option(kind: str, body: str) -> list[Segment]:
    return message({"role": "system", "type": kind}, plain(body))


def _fenced(value: Any, where: str) -> str:
    return f"```json\n{json_text(value, where, is_compact=True)}\n```"


def _schema(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    outer = wanted.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConversationError(
            f"response_format.json_schema.schema is {schema!r}; it must be a JSON object"
        )
    return schema


def _tool_name(tool: Any, position: int) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or tool.get("type") != "function":
        raise ConversationError(
            f'tools[{position}] must be {{"type": "function", "function": {{"name": ...}}}}, '
            f"got {str(tool)[:200]}"
        )
    return name
