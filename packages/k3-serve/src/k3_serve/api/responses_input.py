"""A request to /v1/responses as the chat request that means the same (serving 2a)."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from k3_serve.api.errors import ApiError, bad_request, invalid_body
from k3_serve.api.schemas import ChatRequest, ResponsesRequest

Item = dict[str, Any]
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What a field of the chat request is called in this one.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat request; ApiError 400 for an item, a tool or a value that is not supported."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of(body),
        "tools": None if body.tools is None else [_tool(i, t) for i, t in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _format(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise renamed(invalid_body(error.errors())) from error


def renamed(error: ApiError) -> ApiError:
    """The error with the names that the fields have in a request to /v1/responses."""
    param = error.body["error"]["param"]
    for name, here in _NAMES.items():
        if param is not None and param.startswith(name):
            error.body["error"]["param"] = here + param.removeprefix(name)
    return error


def messages_of(body: ResponsesRequest) -> list[Item]:
    """The conversation. Reasoning, text and calls that follow each other are one turn."""
    messages: list[Item] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: Item | None = None
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            turn = None
            call_id, output = item.get("call_id"), item.get("output")
            content = _content(output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append(_input_message(item, where))
        elif kind in ("message", "reasoning", "function_call"):
            if turn is None or not _fits(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _extend(turn, kind, item, where)
        else:
            raise bad_request(f"{where}.type {str(kind)[:80]!r} is not supported", f"{where}.type")
    return messages


def _input_message(item: Item, where: str) -> Item:
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise bad_request(
            f"{where}.role {str(item.get('role'))[:80]!r} is not one of {', '.join(ROLES)}",
            f"{where}.role",
        )
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _fits(turn: Item, kind: str) -> bool:
    """Whether an item continues a turn: reasoning comes first, text before calls."""
    if kind == "function_call":
        return True
    has_text = turn["content"] is not None or "tool_calls" in turn
    return not has_text and (kind == "message" or "reasoning_content" not in turn)


def _extend(turn: Item, kind: str, item: Item, where: str) -> None:
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning_content"] = "".join(_texts(parts, f"{where}.content"))
    elif kind == "message":
        turn["content"] = _content(item.get("content"), f"{where}.content")
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise bad_request(f"{where} is not a list of parts", where)
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{where} has a part without text", where)
    return texts  # type: ignore[return-value]


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content  # the chat says what is wrong with what is no string
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            place = f"{where}[{index}]"
            raise bad_request(f"{place}.type {str(kind)[:80]!r} is not supported", place)
    return parts


def _tool(index: int, tool: Item) -> Item:
    if tool.get("type") != "function":
        raise bad_request(
            f"tools[{index}].type {str(tool.get('type'))[:80]!r} is not supported; use function",
            f"tools[{index}].type",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(body: ResponsesRequest) -> Item | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    inner = {key: value for key, value in wanted.items() if key != "type"}
    return {"type": "json_schema", "json_schema": inner}
