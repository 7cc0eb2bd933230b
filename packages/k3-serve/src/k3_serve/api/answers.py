"""The answers on the wire as the OpenAPI document shows them (serving 4c).

Only the document uses these: an answer is the fold of its stream, which no model checks while it
is served; the tests check answers against the document.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    """What is wrong: `param` names the field at fault."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error of the server."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the tokens of the prompt, those that a prefix cache had."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the generated tokens, those of the think channel."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Function(BaseModel):
    """What a call calls; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: Function


class Message(BaseModel):
    """The message of a choice. `reasoning` is the same as `reasoning_content`."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ChatLogprobs(BaseModel):
    """The log-probabilities of the tokens of a choice."""

    content: list[dict[str, Any]]


class ChatAnswer(BaseModel):
    """One choice of a chat completion."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswer]
    usage: Usage


class TextAnswer(BaseModel):
    """One choice of a text completion."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: Finish


class TextCompletion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextAnswer]
    usage: Usage


class ResponseUsage(BaseModel):
    """Counts of tokens, as /v1/responses names them."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ModelResponse(BaseModel):
    """The answer of /v1/responses; it repeats the options of the request beside these."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class Tokens(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class TokenizerInfo(BaseModel):
    """The answer of /tokenizer_info: what lm-eval asks for before it uses /tokenize."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str
    eos_token: str
    pad_token: str
    model_max_length: int


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Rendered(BaseModel):
    """The prompt of a chat; its output begins in `channel`."""

    object: Literal["chat.completion.prompt"]
    model: str
    prompt: str
    prompt_token_ids: list[int]
    num_tokens: int
    channel: Literal["think", "response"]


Documented = dict[int | str, dict[str, Any]]
ERRORS: Documented = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def streamed(model: type[BaseModel]) -> Documented:
    """The documentation of a route that answers with a model or with a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": _EVENT}}}}
