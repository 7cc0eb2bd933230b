"""What the tokenizer does, and the rendering of a chat without generating (serving 2a)."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from pydantic import ValidationError

from k3_serve.api import chat
from k3_serve.api.answers import Rendered, Text, TokenizerInfo, Tokens
from k3_serve.api.errors import bad_request, invalid_body
from k3_serve.api.media import fetch_images
from k3_serve.api.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from k3_serve.api.service import Service


def add_tokens(app: FastAPI, service: Service) -> None:
    """Adds the four routes."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.prompt is not None:
            ids = await asyncio.to_thread(service.tokenizer.encode, body.prompt)
        else:
            ids = (await _rendered(_as_chat(body, service), service)).ids
        return Tokens(tokens=ids, count=len(ids), max_model_len=service.engine.max_length)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        service.check_model(body.model)
        try:
            return Text(prompt=service.tokenizer.decode(body.tokens))
        except ValueError as error:
            raise bad_request(str(error), "tokens") from error

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        return TokenizerInfo(
            tokenizer_class=type(service.tokenizer).__name__,
            vocab_size=service.tokenizer.vocab_size,
            bos_token=_name(service, service.tokenizer.bos_id),
            eos_token=_name(service, service.tokenizer.eos_id),
            pad_token=_name(service, service.tokenizer.pad_id),
            model_max_length=service.engine.max_length,
        )

    @app.post("/v1/chat/completions/render")
    async def render(body: ChatRequest) -> Rendered:
        service.check_model(body.model)
        prompt = await _rendered(body, service)
        return Rendered(
            object="chat.completion.prompt",
            model=body.model,
            prompt=service.tokenizer.decode(prompt.ids),
            prompt_token_ids=prompt.ids,
            num_tokens=len(prompt.ids),
            channel=prompt.channel,
        )


def _name(service: Service, token_id: int) -> str:
    return service.tokenizer.token_bytes(token_id).decode()


def _as_chat(body: TokenizeRequest, service: Service) -> ChatRequest:
    fields = body.model_dump(exclude_none=True) | {"model": service.model_id}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error.errors()) from error


async def _rendered(body: ChatRequest, service: Service) -> chat.Prompt:
    files = await fetch_images(body.messages, service.settings, service.observer)
    return await asyncio.to_thread(chat.render, body, service, files)
