"""/tokenize, /detokenize and the prompt of a chat."""

import pytest

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def post(api):  # type: ignore[no-untyped-def]
    return lambda path, **body: api.request("POST", path, json=body)


def test_a_text_goes_there_and_back(post) -> None:  # type: ignore[no-untyped-def]
    body = post("/tokenize", model="scripted", prompt="aé<|open|>").json()
    assert body == {"tokens": list("aé<|open|>".encode()), "count": 11, "max_model_len": 4096}
    assert post("/detokenize", tokens=body["tokens"]).json() == {"prompt": "aé<|open|>"}


def test_the_prompt_of_a_chat_is_what_the_engine_gets(post, api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    fields = {
        "messages": [USER],
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    api.chat(**fields)
    ids = list(engine.requests[0].token_ids)
    rendered = post("/v1/chat/completions/render", model="scripted", **fields).json()
    assert rendered["prompt_token_ids"] == ids
    assert rendered["prompt"] == engine.tokenizer.decode(ids)
    assert (rendered["num_tokens"], rendered["channel"]) == (len(ids), "think")
    assert post("/tokenize", **fields).json()["tokens"] == ids
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, 400, "messages"),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/v1/chat/completions/render", {"model": "scripted", "messages": []}, 400, "messages"),
        ("/v1/chat/completions/render", {"model": "x", "messages": [USER]}, 404, "model"),
    ],
)
def test_what_cannot_be_done_is_named(post, path, body, status, param) -> None:  # type: ignore[no-untyped-def]
    response = post(path, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_the_tokenizer_names_its_special_tokens(api, tokenizer) -> None:  # type: ignore[no-untyped-def]
    info = api.request("GET", "/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.decode([tokenizer.eos_id])
    assert info["bos_token"] == tokenizer.decode([tokenizer.bos_id])
    assert (info["vocab_size"], info["model_max_length"]) == (tokenizer.vocab_size, 4096)
