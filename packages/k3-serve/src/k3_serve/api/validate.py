"""Rules of the request contract that span fields (serving 4b), each naming the field at fault."""

from __future__ import annotations

import re
from typing import Any

from k3_core.xtml.options import EFFORTS, RESPONSE_FORMATS, TOOL_CHOICES
from k3_serve.api.errors import bad_request
from k3_serve.api.schemas import ChatRequest
from k3_serve.limits import Limits, schema_bytes

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_chat(body: ChatRequest, limits: Limits) -> None:
    """Raises ApiError 400 for what the contract refuses."""
    if len(body.messages) > limits.max_messages:
        raise bad_request(
            f"{len(body.messages)} messages; at most {limits.max_messages}", "messages"
        )
    declared = declared_tools(body)
    if len(declared) > limits.max_tools:
        raise bad_request(f"{len(declared)} tools; at most {limits.max_tools}", "tools")
    names: set[str] = set()
    for where, tool in declared:
        names.add(_check_tool(where, tool, limits))
    for index, message in enumerate(body.messages):
        if message.get("role") == "tool" and not message.get("tool_call_id"):
            raise bad_request(
                f"messages[{index}] has role tool but no tool_call_id; give the id of its call",
                f"messages[{index}].tool_call_id",
            )
    _check_tool_choice(body.tool_choice, names)
    if body.response_format is not None:
        _check_response_format(body.response_format, limits)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


def declared_tools(body: ChatRequest) -> list[tuple[str, Any]]:
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


def _check_tool(where: str, tool: Any, limits: Limits) -> str:
    """The name of a tool that is well-formed."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise bad_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name is {str(name)[:80]!r}; it must match {TOOL_NAME.pattern}",
            f"{where}.function.name",
        )
    kinds: dict[str, tuple[type, str]] = {
        "description": (str, "a string"),
        "parameters": (dict, "a JSON schema, which is an object"),
        "strict": (bool, "a boolean"),
    }
    for key, (kind, allowed) in kinds.items():
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            place = f"{where}.function.{key}"
            raise bad_request(f"{place} is {str(value)[:80]!r}; it must be {allowed}", place)
    if function.get("parameters") is not None:
        _check_schema(function["parameters"], f"{where}.function.parameters", limits)
    return name


def _check_schema(schema: Any, where: str, limits: Limits) -> None:
    if (size := schema_bytes(schema)) > limits.max_schema_bytes:
        raise bad_request(
            f"{where} is a schema of {size} bytes; at most {limits.max_schema_bytes}", where
        )


def _check_tool_choice(choice: str | dict[str, Any] | None, names: set[str]) -> None:
    allowed = f'{", ".join(TOOL_CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise bad_request(f"this tool_choice is not one of {allowed}", "tool_choice")
        if name not in names:
            raise bad_request(
                f"tool_choice names {name[:80]!r}, which no tool has", "tool_choice.function.name"
            )
        return
    if choice is not None and choice not in TOOL_CHOICES:
        raise bad_request(f"tool_choice {choice[:80]!r} is not one of {allowed}", "tool_choice")
    if choice == "required" and not names:
        raise bad_request("tool_choice required needs at least one tool", "tool_choice")


def check_effort(effort: str, param: str) -> None:
    """Raises ApiError 400 unless the effort is one of the model's, or "none"."""
    if effort not in (*EFFORTS, "none"):
        raise bad_request(
            f"{param} {effort[:80]!r} is not one of {', '.join(EFFORTS)}, none", param
        )


def _check_response_format(wanted: dict[str, Any], limits: Limits) -> None:
    kind = wanted.get("type")
    if kind not in RESPONSE_FORMATS:
        raise bad_request(
            f"response_format.type {str(kind)[:80]!r} is not one of {', '.join(RESPONSE_FORMATS)}",
            "response_format.type",
        )
    if kind != "json_schema":
        return
    where = "response_format.json_schema"
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
        raise bad_request(f"{where} needs a string name", f"{where}.name")
    if not isinstance(schema.get("schema"), dict):
        raise bad_request(f"{where}.schema must be a JSON object", f"{where}.schema")
    if not isinstance(schema.get("strict", True), bool):
        raise bad_request(f"{where}.strict must be a boolean", f"{where}.strict")
    _check_schema(schema["schema"], f"{where}.schema", limits)
