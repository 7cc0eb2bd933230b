"""The requests on the wire (serving 4b and 4c); unknown fields are allowed and ignored.

Only shapes and ranges are here. What spans several fields is in `validate`, what the chat format
cannot express is refused by its renderer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from k3_core.engine.protocol import MAX_SEED

MAX_CHOICES = 16
Seed = Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Wire(BaseModel):
    """Strict types: a number given as a string is an error, not a number."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """A field that is null is one that is not given: clients write out their defaults."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(Wire):
    include_usage: bool = False


class Thinking(Wire):
    """The `thinking` object; its effort wins over `reasoning_effort`."""

    type: Literal["enabled", "disabled"] = "enabled"
    effort: str | None = None
    keep: Literal["all"] | None = None


class SamplingFields(Wire):
    """What both kinds of completion share. The defaults are those of architecture 9."""

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    logit_bias: dict[str, Bias] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(SamplingFields):
    """The body of /v1/completions. `ignore_eos`, as elsewhere, goes on to `max_tokens`."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    ignore_eos: bool = False
    suffix: None = None
    best_of: None = None


class TokenizeRequest(Wire):
    """The body of /tokenize: a text, or the fields of a chat, whose prompt is then tokenized."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(Wire):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class ReasoningOptions(Wire):
    """How hard to think, in a request to /v1/responses."""

    effort: str | None = None


class TextOptions(Wire):
    """The format of the text, in a request to /v1/responses."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Wire):
    """The body of /v1/responses. Nothing is stored, so nothing stored can be referred to."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    stream: bool = False
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
