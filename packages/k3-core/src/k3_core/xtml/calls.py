"""Tool calls of an assistant message, and the order and names of their results (architecture 8)."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from k3_core.xtml.json_text import ConversationError, json_text
from k3_core.xtml.segments import Segment, closer, element, opener, plain

_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


class Call(NamedTuple):
    """One checked tool call. `arguments` is a string when it could not be read as JSON."""

    id: str | None
    name: str
    arguments: dict[str, Any] | str


def read_calls(message: Mapping[str, Any], where: str) -> list[Call]:
    """The checked calls of an assistant message. Raises ConversationError for a malformed one.

    Arguments may be an object, a string holding a JSON object, or None or blank for none. A
    string that is no JSON is kept; JSON that is not an object is refused.
    """
    raw_calls = message.get("tool_calls") or []
    if not isinstance(raw_calls, list):
        raise ConversationError(f"{where}: tool_calls is a {type(raw_calls).__name__}, not a list")
    return [_read_call(raw, f"{where}.tool_calls[{i}]") for i, raw in enumerate(raw_calls)]


def call_segments(call: Call, index: int) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """The call's opener, its arguments and its closer; `index` counts from 1."""
    start = opener("call", {"tool": call.name, "index": str(index)})
    if isinstance(call.arguments, str):
        arguments = element("json", plain(call.arguments), {"type": "object"})
    else:
        arguments = [s for k, v in call.arguments.items() for s in _argument(k, v)]
    return start, arguments, closer("call")


def order_results(run: list[dict[str, Any]], calls: list[Call], num_before: int) -> list[str]:
    """Sort one run of tool messages in place into call order; return their tool names.

    The run is sorted when each `tool_call_id` is the id of a call or `name:position` (from 0).
    Otherwise it stays, and a result is named by its `tool` or `name` or by its position among
    the results since the assistant message, of which `num_before` came earlier.
    """
    positions = _positions(calls)
    ids = [result.get("tool_call_id") for result in run]
    if all(isinstance(call_id, str) and call_id in positions for call_id in ids):
        run.sort(key=lambda result: positions[result["tool_call_id"]])
        return [calls[positions[result["tool_call_id"]]].name for result in run]
    return [_name(result, calls, num_before + i) for i, result in enumerate(run)]


def _positions(calls: list[Call]) -> dict[str, int]:
    positions = {f"{call.name}:{i}": i for i, call in enumerate(calls)}
    ids = [call.id for call in calls]
    # An id of two calls identifies neither.
    unique = {i: call.id for i, call in enumerate(calls) if call.id and ids.count(call.id) == 1}
    return positions | {call_id: i for i, call_id in unique.items()}


def _name(result: Mapping[str, Any], calls: list[Call], position: int) -> str:
    name = result.get("tool") or result.get("name")
    if name is None and position < len(calls):
        name = calls[position].name
    if not isinstance(name, str):
        raise ConversationError(
            f"cannot tell which tool result {position + 1} is of: tool_call_id "
            f"{result.get('tool_call_id')!r} is not the id of a call, there are {len(calls)} "
            f"calls before it, and the message has no `tool` or `name`"
        )
    return name


def _read_call(raw: Any, where: str) -> Call:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConversationError(f"{where} has no function.name: {str(raw)[:200]}")
    call_id = raw.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise ConversationError(f"{where}: id {call_id!r} is not a string")
    return Call(call_id, name, _read_arguments(function.get("arguments"), where))


def _read_arguments(raw: Any, where: str) -> dict[str, Any] | str:
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    value = raw
    if isinstance(raw, str):
        try:
            value = json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return raw
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConversationError(f"{where}: arguments are {str(raw)[:200]!r}, not a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _argument(key: str, value: Any) -> list[Segment]:
    kind = _TYPES.get(type(value)) or ("object" if isinstance(value, dict) else "array")
    if kind != "string":
        # With spaces after the separators, unlike in declarations.
        value = json_text(value, f"argument {key!r}")
    return element("argument", plain(value), {"key": key, "type": kind})
