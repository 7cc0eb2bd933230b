"""From a chat request to the grammar that its answer is held to (serving 2a and 5A)."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Literal

from k3_serve.api.errors import bad_request
from k3_serve.api.partial import Prefix
from k3_serve.api.schemas import ChatRequest
from k3_serve.api.service import Service
from k3_serve.api.validate import declared_tools
from k3_serve.grammar import (
    MAX_CALLS,
    GrammarConstraint,
    GrammarError,
    Tool,
    Turn,
    turn_grammar,
)

logger = logging.getLogger("k3_serve")


def constraint_of(
    body: ChatRequest,
    channel: Literal["think", "response"],
    prefix: Prefix | None,
    service: Service,
) -> GrammarConstraint | None:
    """The constraint of the answer, past the prefix; None when any answer will do.

    Raises ApiError 400 for a schema that cannot be enforced and for a prefix that does not begin
    an answer that is allowed.
    """
    turn = turn_of(body, channel)
    if turn.is_free:
        return None
    param = "response_format" if turn.json_schema is not None else "tools"
    try:
        constraint = _compile(turn, service)
    except GrammarError as error:
        raise bad_request(str(error), param, "grammar") from error
    except RecursionError as error:
        raise bad_request("a schema is nested too deeply or refers to itself", param) from error
    if prefix is not None and not constraint.accepts(service.tokenizer.encode(prefix.text)):
        raise bad_request(
            "the partial message does not begin an answer that response_format allows", "messages"
        )
    return constraint


def turn_of(body: ChatRequest, channel: Literal["think", "response"]) -> Turn:
    """What the request demands of the turn."""
    tools = [tool["function"] for _, tool in declared_tools(body)]
    choice, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, dict):
        tools = [tool for tool in tools if tool["name"] == choice["function"]["name"]]
    calls: Literal["never", "maybe", "always"] = "maybe"
    if choice == "none":
        calls = "never"
    elif choice == "required" or isinstance(choice, dict):
        calls = "always"
    return Turn(
        channel,
        tuple(Tool(t["name"], t.get("parameters"), t.get("strict")) for t in tools),
        calls,
        MAX_CALLS if is_parallel else 1,
        _response_schema(body.response_format),
    )


def _response_schema(wanted: dict[str, Any] | None) -> Any:
    kind = None if wanted is None else wanted["type"]
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    asked = wanted["json_schema"]
    # Not strict: any JSON will do, the schema is only shown to the model.
    return asked["schema"] if asked.get("strict") is not False else True


def _compile(turn: Turn, service: Service) -> GrammarConstraint:
    """The strict grammar, or for tools that do not demand it the part that can be enforced."""

    def compiled(wanted: Turn, is_lenient: bool = False) -> GrammarConstraint:
        start = time.perf_counter()
        try:
            return service.compiler.compile(turn_grammar(wanted, service.tokenizer, is_lenient))
        finally:
            seconds = time.perf_counter() - start
            service.observer.observe("k3_grammar_compile_seconds", seconds)

    try:
        return compiled(turn)
    except GrammarError:
        if all(tool.strict for tool in turn.tools):
            raise
    logger.info("the parameters of tools are enforced in part only: they are not strict")
    try:
        return compiled(turn, is_lenient=True)
    except GrammarError:
        bare = (t if t.strict else replace(t, strict=False) for t in turn.tools)
        return compiled(replace(turn, tools=tuple(bare)))
