"""Over a real socket: disconnects, the openai client, and our own client."""

import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from k3_core.cli.chat_client import ChatClient
from k3_core.errors import K3Error
from k3_serve.api.app import create_app
from k3_serve.limits import Limits
from k3_serve.settings import Settings
from k3_serve.testing import Script

ANSWER = "hm<|close|>think<|sep|><|open|>response<|sep|>four<|close|>response<|sep|><|end_of_msg|>"
CALL = (
    "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|end_of_msg|>"
)
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "2+2?"}]}


def wait_for(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("is_streamed", "hold_after"), [(True, 3), (True, 0), (False, 3)])
def test_a_client_that_goes_away_aborts_its_requests(  # type: ignore[no-untyped-def]
    url, engine, script, is_streamed, hold_after
) -> None:
    engine.scripts = [Script(script(ANSWER)[:hold_after], holds=True)]
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    headers = {"Content-Type": "application/json"}
    body = json.dumps({**BODY, "stream": is_streamed, "n": 2, "max_tokens": 99})
    connection.request("POST", "/v1/chat/completions", body, headers)
    if is_streamed and hold_after:
        assert connection.getresponse().readline().startswith(b"data: ")
    else:
        wait_for(lambda: len(engine.requests) == 2)
    assert not engine.aborted
    connection.close()
    wait_for(lambda: {"request-0", "request-1"} <= set(engine.aborted))


def test_a_client_that_reads_nothing_is_given_up(  # type: ignore[no-untyped-def]
    engine, tokenizer, serving_of, caplog
) -> None:
    engine.scripts = [list(b"x" * 4000)]
    app = create_app(engine, tokenizer, "scripted", Settings(Limits(send_seconds=0.2)))
    with serving_of(app) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        client.connect((address.hostname, address.port))
        wide = {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 4}  # fills all buffers
        body = json.dumps({**BODY, **wide}).encode()
        head = f"Host: k3\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        wait_for(lambda: "a client read nothing for 0.2 s" in caplog.text)
        wait_for(lambda: len(set(engine.aborted)) == 4)


def test_the_openai_client_reads_streams_tools_and_errors(url, engine, script) -> None:  # type: ignore[no-untyped-def]
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    engine.scripts = [script(ANSWER), script(ANSWER), script(CALL)]
    whole = client.chat.completions.create(**BODY, reasoning_effort="low")
    assert whole.choices[0].message.content == "four"
    assert whole.choices[0].message.reasoning_content == "hm"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2
    stream = client.chat.completions.create(
        **BODY, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (text, chunks[-1].usage.total_tokens) == ("four", whole.usage.total_tokens)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    (call,) = client.chat.completions.create(**BODY, tools=tools).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    assert [model.id for model in client.models.list()] == ["scripted"]
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(**BODY, top_p=7)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")


def test_the_openai_client_reads_responses(url, engine, script) -> None:  # type: ignore[no-untyped-def]
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    engine.scripts = [script(ANSWER)]
    whole = client.responses.create(model="scripted", input="2+2?", reasoning={"effort": "low"})
    assert (whole.status, whole.output_text) == ("completed", "four")
    assert whole.output[0].content[0].text == "hm"
    with client.responses.stream(model="scripted", input="2+2?") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (text, final.output_text) == ("four", "four")
    engine.scripts = [script(CALL)]
    tool = {"type": "function", "name": "now", "parameters": {}, "strict": False}
    history = [{"role": "user", "content": "2+2?"}]
    called = client.responses.create(model="scripted", input=history, tools=[tool])
    call = called.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "now", "{}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    again = [*history, *(item.model_dump() for item in called.output), result]
    client.responses.create(model="scripted", input=again, tools=[tool])
    prompt = engine.tokenizer.decode(engine.requests[-1].token_ids)
    assert 'role="tool" tool="now" index="1"<|sep|>noon' in prompt


def test_our_client_streams_and_reports_errors(url, engine, script) -> None:  # type: ignore[no-untyped-def]
    client = ChatClient(url)
    client.wait_until_healthy(5, lambda: True)
    assert client.model() == "scripted"
    engine.scripts = [script(ANSWER)]
    deltas = [c["delta"] for chunk in client.stream(BODY) for c in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "four"
    with pytest.raises(K3Error, match="answered 404: model 'x' does not exist"):
        list(client.stream({**BODY, "model": "x"}))
    engine.scripts = [script("hm<|close|>think<|sep|>hello<|end_of_msg|>")]
    tools = [{"type": "function", "function": {"name": "now"}}]
    with pytest.raises(K3Error, match="broke off: generation failed: token"):
        list(client.stream({**BODY, "tools": tools, "tool_choice": "required"}))


def test_our_client_names_what_is_wrong_with_the_address() -> None:
    with pytest.raises(K3Error, match="not an http address"):
        ChatClient("ftp://somewhere")
    with pytest.raises(K3Error, match=r"no server answers at .*start `k3 serve`"):
        ChatClient("127.0.0.1:1").model()
    with pytest.raises(K3Error, match="ended before"):
        ChatClient("127.0.0.1:1").wait_until_healthy(5, lambda: False)
