"""Rules of the request contract that span fields (serving 4b), each naming the field at fault."""

from __future__ import annotations

import re
from typing import Any

from k3_core.xtml.options import EFFORTS, RESPONSE_FORMATS, TOOL_CHOICES
from k3_serve.api.errors import bad_request
from k3_serve.api.schemas import ChatRequest
from k3_serve.limits import Limits

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_chat(body: ChatRequest, limits: Limits) -> None:
    """Raises ApiError 400 for what the contract refuses."""
    if len(body.messages) > limits.max_messages:
        raise bad_request(
            f"{len(body.messages)} messages; at most {limits.max_messages}", "messages"
        )
    declared = _declared_tools(body)
    if len(declared) > limits.max_tools:
        raise bad_request(f"{len(declared)} tools; at most {limits.max_tools}", "tools")
    for where, tool in declared:
        _check_tool(where, tool)
    for index, message in enumerate(body.messages):
        if message.get("role") == "tool" and not message.get("tool_call_id"):
            raise bad_request(
                f"messages[{index}] has role tool but no tool_call_id; give the id of its call",
                f"messages[{index}].tool_call_id",
            )
        if message.get("partial"):
            where = f"messages[{index}].partial"
            raise bad_request(f"{where}: continuing a message is not supported", where)
    _check_tool_choice(body.tool_choice, bool(declared))
    if body.response_format is not None:
        _check_response_format(body.response_format)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


def _declared_tools(body: ChatRequest) -> list[tuple[str, Any]]:
    """Every declaration of the request with its place, those in system messages included."""
    found: list[tuple[str, Any]] = [(f"tools[{i}]", t) for i, t in enumerate(body.tools or ())]
    for index, message in enumerate(body.messages):
        where, dynamic = f"messages[{index}].tools", message.get("tools")
        if dynamic is None:
            continue
        if message.get("role") != "system":
            raise bad_request(f"{where}: only a system message may declare tools", where)
        if not isinstance(dynamic, list):
            raise bad_request(f"{where} is a {type(dynamic).__name__}, not a list", where)
        found += [(f"{where}[{i}]", tool) for i, tool in enumerate(dynamic)]
    return found


def _check_tool(where: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise bad_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name is {str(name)[:80]!r}; it must match {TOOL_NAME.pattern}",
            f"{where}.function.name",
        )


def _check_tool_choice(choice: str | dict[str, Any] | None, has_tools: bool) -> None:
    allowed = ", ".join(TOOL_CHOICES)
    if isinstance(choice, dict):
        raise bad_request(
            f"a named tool_choice is not supported; use one of {allowed}", "tool_choice"
        )
    if choice is not None and choice not in TOOL_CHOICES:
        raise bad_request(f"tool_choice {choice[:80]!r} is not one of {allowed}", "tool_choice")
    if choice == "required" and not has_tools:
        raise bad_request("tool_choice required needs at least one tool", "tool_choice")


def check_effort(effort: str, param: str) -> None:
    """Raises ApiError 400 unless the effort is one of the model's, or "none"."""
    if effort not in (*EFFORTS, "none"):
        raise bad_request(
            f"{param} {effort[:80]!r} is not one of {', '.join(EFFORTS)}, none", param
        )


def _check_response_format(wanted: dict[str, Any]) -> None:
    kind = wanted.get("type")
    if kind not in RESPONSE_FORMATS:
        raise bad_request(
            f"response_format.type {str(kind)[:80]!r} is not one of {', '.join(RESPONSE_FORMATS)}",
            "response_format.type",
        )
    if kind != "json_schema":
        return
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
        raise bad_request(
            "response_format.json_schema needs a string name", "response_format.json_schema.name"
        )
    if not isinstance(schema.get("schema"), dict):
        raise bad_request(
            "response_format.json_schema.schema must be a JSON object",
            "response_format.json_schema.schema",
        )
    if not isinstance(schema.get("strict", True), bool):
        raise bad_request(
            "response_format.json_schema.strict must be a boolean",
            "response_format.json_schema.strict",
        )
