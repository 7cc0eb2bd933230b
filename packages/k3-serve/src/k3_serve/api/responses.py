"""/v1/responses: the events of a response, made from the chunks of a chat (serving 2a and 5C).

The response that is not streamed is the one in the last event of the stream.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from k3_serve.api import chat, sse
from k3_serve.api.answers import ModelResponse, streamed
from k3_serve.api.errors import ApiError
from k3_serve.api.fold import Chunk
from k3_serve.api.responses_input import as_chat, renamed
from k3_serve.api.schemas import ResponsesRequest
from k3_serve.api.service import Service, salt_of

Item = dict[str, Any]


def add_responses(app: FastAPI, service: Service) -> None:
    """Adds the route."""

    @app.post("/v1/responses", response_model=None, responses=streamed(ModelResponse))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check_model(body.model)
        wanted = as_chat(body)
        try:
            prepared = await chat.prepare_async(wanted, service, salt_of(request))
            run = service.run(prepared.requests, "messages")
        except ApiError as error:
            raise renamed(error) from error
        builder = ResponseEvents(body)
        events = builder.events(chat.chat_chunks(wanted, prepared, run, service))
        if not body.stream:
            return await sse.answer(request, run, events, last_response)
        return await sse.stream(request, run, events, written, fail=builder.failure)


def written(event: Item) -> bytes:
    """An event with its name, as this protocol has it."""
    return b"event: %b\n%b" % (event["type"].encode(), sse.data(event))


def last_response(events: Iterable[Item]) -> Item:
    """The response that a stream amounts to."""
    *_, last = events
    response: Item = last["response"]
    return response


class ResponseEvents:
    """Turns the chunks of a chat with one choice into events, item by item."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._number = 0
        self._item: Item | None = None
        self._response: Item = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 0.95 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Item]:
        """All events of the response, the one with the whole of it last."""
        is_cut = False
        async for chunk in chunks:
            if self._number == 0:  # with the first chunk: a failure before it is a status
                yield self._event("response.created", response=self._snapshot())
                yield self._event("response.in_progress", response=self._snapshot())
            for choice in chunk["choices"]:
                for event in self._delta(choice["delta"]):
                    yield event
                if choice["finish_reason"] is not None:
                    is_cut = choice["finish_reason"] == "length"
                    for event in self._close("incomplete" if is_cut else "completed"):
                        yield event
            if "usage" in chunk:
                self._response["usage"] = _usage(chunk["usage"])
        self._response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{self._response['status']}", response=self._snapshot())

    def failure(self, body: Item) -> bytes:
        """The event that ends a stream in which something failed."""
        error = body["error"]
        code = error["code"] or error["type"]
        self._response |= {"status": "failed", "error": {"code": code, "message": error["message"]}}
        return written(self._event("response.failed", response=self._snapshot()))

    def _event(self, kind: str, **fields: Any) -> Item:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _snapshot(self) -> Item:
        return _copy(self._response)

    def _delta(self, delta: Item) -> Iterator[Item]:
        if text := delta.get("reasoning_content"):
            yield from self._text("reasoning", text)
        if text := delta.get("content"):
            yield from self._text("message", text)
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                name = piece["function"]["name"]
                yield from self._open("function_call", call_id=piece["id"], name=name, arguments="")
            if fragment := piece["function"]["arguments"]:
                assert self._item is not None
                self._item["arguments"] += fragment
                yield self._of_item("response.function_call_arguments.delta", delta=fragment)

    def _text(self, kind: str, text: str) -> Iterator[Item]:
        name = _TEXT[kind]
        if self._item is None or self._item["type"] != kind:
            fields: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._open(kind, **fields, content=[])
            assert self._item is not None
            part: Item = {"type": name, "text": ""}
            if kind == "message":
                part["annotations"] = []
            yield self._of_item("response.content_part.added", content_index=0, part=dict(part))
            self._item["content"].append(part)
        self._item["content"][0]["text"] += text
        yield self._of_item(f"response.{name}.delta", content_index=0, delta=text)

    def _open(self, kind: str, **fields: Any) -> Iterator[Item]:
        yield from self._close("completed")
        item_id = f"{_PREFIX[kind]}_{uuid.uuid4().hex}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._response["output"].append(self._item)
        yield self._event(
            "response.output_item.added", output_index=self._index, item=_copy(self._item)
        )

    def _close(self, status: str) -> Iterator[Item]:
        """The events that end the open item, if there is one."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._of_item("response.function_call_arguments.done", arguments=arguments)
        else:
            (part,) = item["content"]
            name = f"response.{part['type']}.done"
            yield self._of_item(name, content_index=0, text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=dict(part))
        yield self._event("response.output_item.done", output_index=self._index, item=_copy(item))
        self._item = None

    def _of_item(self, kind: str, **fields: Any) -> Item:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1


_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}
_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _copy(item: Item) -> Item:
    copy: Item = json.loads(json.dumps(item))
    return copy


def _usage(usage: Item) -> Item:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
