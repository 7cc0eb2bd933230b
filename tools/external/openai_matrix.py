"""What the openai client does with a running server: one check a feature, a table, an exit code.

Usage: python tools/external/openai_matrix.py URL   (an environment with openai alone is enough)
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import openai
from support import ASK, LIMIT, LOOKUP, OTHER, SCHEMA, num_running, png, raised, text_of

Check = Callable[[openai.OpenAI, str], str]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Adds a check; it returns what to show of a success and raises otherwise."""
    CHECKS.append(function)
    return function


@check
def models(client: openai.OpenAI, model: str) -> str:
    """The list, and one by name."""
    names = [one.id for one in client.models.list()]
    assert names == [model] and client.models.retrieve(model).id == model
    return model


@check
def chat(client: openai.OpenAI, model: str) -> str:
    """Content, reasoning, usage and the end."""
    found = client.chat.completions.create(
        model=model, messages=ASK, reasoning_effort="low", **LIMIT
    )
    (choice,) = found.choices
    usage = found.usage
    assert choice.finish_reason == "stop" and choice.message.content
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens >= 0
    return repr(choice.message.content)


@check
def chat_stream(client: openai.OpenAI, model: str) -> str:
    """The deltas of a stream amount to the whole answer; the usage is in the last chunk."""
    asked = dict(model=model, messages=ASK, reasoning_effort="high", **LIMIT)
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert text_of(chunks) == whole.choices[0].message.content
    reasoning = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        for chunk in chunks
        if chunk.choices
    )
    assert reasoning == (whole.choices[0].message.reasoning_content or "")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return f"{len(chunks)} chunks"


@check
def chat_stream_helper(client: openai.OpenAI, model: str) -> str:
    """The client's own accumulation of a stream."""
    with client.chat.completions.stream(model=model, messages=ASK, **LIMIT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].finish_reason == "stop"
    return repr(final.choices[0].message.content)


@check
def tools_auto(client: openai.OpenAI, model: str) -> str:
    """The model may call; whatever it does is consistent."""
    choice = _calls(client, model, "auto", [LOOKUP])
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    return choice.finish_reason


@check
def tools_required(client: openai.OpenAI, model: str) -> str:
    """A call is enforced, and its result is taken back."""
    choice = _calls(client, model, "required", [LOOKUP, OTHER])
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "42"}
        for call in choice.message.tool_calls
    ]
    history = [*ASK, choice.message.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(
        model=model, messages=history, tools=[LOOKUP, OTHER], tool_choice="none", **LIMIT
    )
    assert answer.choices[0].message.tool_calls is None
    return f"{len(results)} calls"


@check
def tools_named(client: openai.OpenAI, model: str) -> str:
    """A named function is the one that is called, with arguments that fit."""
    named = {"type": "function", "function": {"name": "lookup"}}
    choice = _calls(client, model, named, [OTHER, LOOKUP])
    for call in choice.message.tool_calls:
        assert call.function.name == "lookup" and "key" in json.loads(call.function.arguments)
    return choice.message.tool_calls[0].function.arguments


@check
def tools_one_call(client: openai.OpenAI, model: str) -> str:
    """`parallel_tool_calls=False` allows one."""
    choice = _calls(client, model, "required", [LOOKUP, OTHER], parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1
    return choice.message.tool_calls[0].function.name


@check
def tools_parallel_history(client: openai.OpenAI, model: str) -> str:
    """Two calls in one turn and their results are a history; streamed calls are whole."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "lookup", "arguments": text}}
        for i, text in enumerate(('{"key": "moon"}', '{"key": "tree"}'))
    ]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in range(2)]
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=history,
            tools=[LOOKUP],
            tool_choice="required",
            reasoning_effort="none",  # the limit is for calls
            stream=True,
            **LIMIT,
        )
    )
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                found[part.index] = found.get(part.index, "") + (part.function.arguments or "")
    assert found and all("key" in json.loads(text) for text in found.values())
    return f"{len(found)} calls"


@check
def json_schema(client: openai.OpenAI, model: str) -> str:
    """A schema is enforced."""
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=ASK, response_format=form, **LIMIT
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"sum", "unit"} and value["unit"] in "ms"
    return json.dumps(value)


@check
def json_object(client: openai.OpenAI, model: str) -> str:
    """Some object, unless the limit cuts it."""
    answer = client.chat.completions.create(
        model=model, messages=ASK, response_format={"type": "json_object"}, **LIMIT
    )
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.lstrip().startswith("{")
    return choice.finish_reason


@check
def logprobs(client: openai.OpenAI, model: str) -> str:
    """One entry a token with its alternatives; greedy takes the likeliest."""
    answer = client.chat.completions.create(
        model=model, messages=ASK, logprobs=True, top_logprobs=3, **LIMIT
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)
    return f"{len(content)} tokens"


@check
def several_choices(client: openai.OpenAI, model: str) -> str:
    """`n`, streamed and not."""
    asked = {"model": model, "messages": ASK, "n": 3, "seed": 5, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    chunks = client.chat.completions.create(**asked, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}
    return "3"


@check
def stop(client: openai.OpenAI, model: str) -> str:
    """A stop string cuts the text before itself."""
    asked = {"model": model, "prompt": "for i in range(", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    mark = whole[3:5]
    cut = client.completions.create(**asked, stop=[mark]).choices[0]
    assert cut.text == whole[: whole.index(mark)] and cut.finish_reason == "stop"
    return repr(mark)


@check
def seed(client: openai.OpenAI, model: str) -> str:
    """The same seed, the same text."""
    asked = {"model": model, "prompt": "def ", "max_tokens": 16, "temperature": 1.0}
    texts = [client.completions.create(**asked, seed=s).choices[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    return repr(texts[0])


@check
def image(client: openai.OpenAI, model: str) -> str:
    """An image as a data URL; its rows are in the usage. A model without vision refuses it."""
    url = "data:image/png;base64," + base64.b64encode(png(56, 28)).decode()
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    used = [
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            max_completion_tokens=4,
        ).usage.prompt_tokens
        for content in (parts[:1], parts)
    ]
    assert used[1] > used[0]
    return f"{used[1] - used[0]} tokens"


@check
def completions(client: openai.OpenAI, model: str) -> str:
    """Echo with log-probabilities, token ids as a prompt, several prompts, a stream."""
    asked = {"model": model, "temperature": 0, "max_tokens": 4}
    echoed = client.completions.create(**asked, prompt="import os\n", echo=True, logprobs=2)
    (choice,) = echoed.choices
    assert choice.text.startswith("import os\n") and choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == echoed.usage.total_tokens
    texts = client.completions.create(**asked, prompt=["import ", "class "]).choices
    assert [one.index for one in texts] == [0, 1]
    ids = client.completions.create(**asked, prompt=[105, 109, 112, 111, 114, 116, 32])
    assert ids.usage.prompt_tokens == 7
    chunks = client.completions.create(**asked, prompt="import ", stream=True)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == texts[0].text
    return repr(texts[0].text)


@check
def responses(client: openai.OpenAI, model: str) -> str:
    """Created and streamed; a function call."""
    asked = {
        "model": model,
        "input": "What is 12 + 30?",
        "reasoning": {"effort": "low"},
        "temperature": 0,
    }
    whole = client.responses.create(**asked, max_output_tokens=160)
    assert whole.status == "completed" and whole.output_text
    with client.responses.stream(**asked, max_output_tokens=160) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    tool = {"type": "function", "strict": False, **LOOKUP["function"]}
    called = client.responses.create(
        **asked, tools=[tool], tool_choice="required", max_output_tokens=160
    )
    assert called.output[-1].type == "function_call"
    return repr(text)


@check
def errors(client: openai.OpenAI, model: str) -> str:
    """Statuses become the client's exceptions, with the field at fault."""
    create = client.chat.completions.create
    found = raised(openai.BadRequestError, lambda: create(model=model, messages=ASK, top_p=7))
    assert found.status_code == 400 and found.param == "top_p" and "top_p" in found.message
    found = raised(openai.NotFoundError, lambda: create(model="gpt", messages=ASK))
    assert found.code == "model_not_found"
    long = [{"role": "user", "content": "x"}]
    raised(
        openai.BadRequestError,
        lambda: create(model=model, messages=long, max_completion_tokens=1 << 40),
    )
    nobody = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    raised(openai.APIConnectionError, lambda: nobody.models.list())
    return "400 404 connection"


@check
def asynchronous(client: openai.OpenAI, model: str) -> str:
    """The asynchronous client, eight requests at a time, same answers."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as many:
            answers = await asyncio.gather(
                *(
                    many.completions.create(
                        model=model, prompt="import ", temperature=0, max_tokens=8
                    )
                    for _ in range(8)
                )
            )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    return repr(texts[0])


@check
def timeouts_and_aborts(client: openai.OpenAI, model: str) -> str:
    """A client that gives up, and one that closes its stream, leave nothing running."""
    asked = {"model": model, "prompt": "x", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    hasty = client.with_options(timeout=0.5, max_retries=0)
    raised(openai.APITimeoutError, lambda: hasty.completions.create(**asked))
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 20
    while (running := num_running(client)) > 0:
        assert time.monotonic() < deadline, f"{running} requests still run"
        time.sleep(0.2)
    return "0 running"


def _calls(client: openai.OpenAI, model: str, choice: Any, tools: list[Any], **more: Any) -> Any:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Use the tool to look up moon."}],
        tools=tools,
        tool_choice=choice,
        **more,
        **LIMIT,
    )
    return answer.choices[0]


def main() -> int:
    """Runs every check; the exit code is 1 when one fails."""
    url = sys.argv[1].rstrip("/")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    num_failed = 0
    print(f"openai {openai.__version__}, {len(CHECKS)} checks of {model}")
    for one in CHECKS:
        try:
            verdict, detail = "pass", one(client, model)
        except Exception as error:
            verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
            num_failed += 1
            traceback.print_exc()
        print(f"{one.__name__:<24} {verdict}  {detail[:100]}", flush=True)
    print(f"{len(CHECKS) - num_failed} of {len(CHECKS)} passed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
