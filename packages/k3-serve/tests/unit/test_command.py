"""`k3 serve` as a process, on a tiny random model: start, answer, error, SIGTERM."""

import base64
import io
import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.cli.chat_client import ChatClient
from k3_core.engine import Request, Sampling, SimpleEngine
from k3_core.engine.load import load_engine
from k3_core.errors import K3Error
from k3_serve.api.app import create_app
from k3_serve.ops.command import ModelChoice, Server
from k3_serve.settings import Settings

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):  # type: ignore[no-untyped-def]
    config = K3Config.preset("k3-test")
    assert config.text.vocab_size == tokenizer.vocab_size
    generator = torch.Generator().manual_seed(0)
    model = K3ForConditionalGeneration(config, generator=generator)
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    model.save_pretrained(path, tokenizer=tokenizer)
    return path


def serve(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "k3_core.cli.app", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_process_serves_and_ends_cleanly_on_sigterm(folder) -> None:  # type: ignore[no-untyped-def]
    process = serve(str(folder), "--port", "0", "--threads", "1", "--draft", "ngram")
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "listening" in line)
        assert "draft ngram of 4 tokens" in line
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, line
        client = ChatClient(address[0])
        client.wait_until_healthy(20, lambda: process.poll() is None)
        assert client.model() == "tiny"
        body = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 3}
        reasons = [c["finish_reason"] for chunk in client.stream(body) for c in chunk["choices"]]
        assert reasons[-1] in ("length", "stop")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_missing_model_is_one_line() -> None:
    process = serve("no-such-model", "--port", "0")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "'no-such-model' is not a folder" in output
    assert output.count("\n") == 1


def test_a_draft_that_does_not_fit_is_refused_before_loading(folder, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Server, "_load", None)
    for draft, message in (
        ("eagle", "draft 'eagle' is not one of ngram, mtp"),
        ("mtp", "num_nextn_predict_layers is 0: the model has no MTP layer"),
    ):
        choice = ModelChoice(str(folder), "cpu", "float32", "packed", 2, draft=draft)
        with pytest.raises(K3Error, match=message):
            Server(choice, "127.0.0.1", 0, Settings()).run(print)


def test_a_device_that_is_not_there_is_named(folder) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(K3Error, match="device 'warp' is not usable"):
        load_engine(str(folder), device="warp")


def test_the_api_gives_the_tokens_of_the_engine(folder, tokenizer, api_of) -> None:  # type: ignore[no-untyped-def]
    engine, loaded = load_engine(str(folder), max_batch=2)
    prompts = [[1, 2, 3], [200, 100]]
    with engine:
        greedy = Sampling(max_tokens=8, temperature=0, stop_ids=tuple(loaded.stop_ids))
        expected = engine.generate([Request(tuple(prompt), greedy) for prompt in prompts])
        api = api_of(create_app(engine, loaded, "tiny"))
        fields = {"model": "tiny", "temperature": 0, "max_tokens": 8, "logprobs": 0}
        choices = api.complete(prompt=prompts, **fields).json()["choices"]
    for choice, done in zip(choices, expected, strict=True):
        ids = [i for i in done.token_ids if i not in tokenizer.stop_ids]
        assert choice["text"] == tokenizer.decode(ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-4)


def test_a_model_that_knows_nothing_still_obeys_a_grammar(folder, api_of) -> None:  # type: ignore[no-untyped-def]
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    function = {"name": "f", "parameters": schema, "strict": True}
    engine, loaded = load_engine(str(folder), max_batch=4)
    # The random model would never end its reasoning: none, and a bias towards what closes.
    fields = {"model": "tiny", "reasoning_effort": "none", "n": 2, "seed": 5, "max_tokens": 400}
    bias = {str(i): 8 for i in (loaded.open_id, loaded.close_id, *b"0123456789")}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with engine:
        api = api_of(create_app(engine, loaded, "tiny"))
        whole = api.chat(response_format=wanted, logit_bias=bias, **fields).json()
        tools = [{"type": "function", "function": function}]
        called = api.chat(
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            logit_bias=bias,
            **fields,
        ).json()
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert value["kind"] in ("a", "b") and value["count"] <= 9
    for choice in called["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        value = json.loads(call["function"]["arguments"])
        assert value["kind"] in ("a", "b") and value["count"] <= 9


def test_images_to_a_text_model_are_refused(folder, tokenizer, api_of) -> None:  # type: ignore[no-untyped-def]
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    model = K3ForConditionalGeneration.from_pretrained(folder)
    if model.config.vision is not None:
        pytest.skip("k3-test has a vision tower")
    with SimpleEngine(model, tokenizer) as engine:
        api = api_of(create_app(engine, tokenizer, "scripted"))
        response = api.chat(messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert "no vision tower" in response.json()["error"]["message"]
