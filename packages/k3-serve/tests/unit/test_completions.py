"""Raw completions of chosen tokens."""

import pytest

from k3_serve.testing import Script


def test_text_and_usage(api, engine) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [list("naïve".encode())]
    body = api.complete(prompt="abc").json()
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "naïve", "logprobs": None, "finish_reason": "length"}
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6
    assert engine.requests[0].channel is None


def test_a_stop_token_adds_no_text(api, engine, tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[*b"done", tokenizer.eos_id]]
    (choice,) = api.complete(prompt="x").json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("done", "stop")


def test_stream_holds_back_half_characters_and_half_stops(api, engine, read_events) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [Script(list("é one E EN END more".encode()), spans=(1,))]
    events = read_events(api.complete(prompt="x", stream=True, stop=["END"], max_tokens=99))
    parts = [event["choices"][0] for event in events[:-1]]
    texts = [part["text"] for part in parts]
    assert "".join(texts) == "é one E EN "
    assert texts[0] == "é"
    assert "EN" not in texts  # held until the space shows that it is no stop
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert texts[-1] == ""
    assert events[-1] == "[DONE]"


def test_tokens_that_come_together_are_one_event(api, engine, read_events) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [Script(list(b"one two"), spans=(1, 2))]
    options = {"stream_options": {"include_usage": True}, "logprobs": 0}
    *events, usage, _ = read_events(api.complete(prompt="x", stream=True, **options))
    parts = [event["choices"][0] for event in events]
    assert [part["text"] for part in parts] == ["o", "ne", " t", "wo", ""]
    lists = [part["logprobs"] for part in parts]
    assert [one["tokens"] for one in lists] == [["o"], ["n", "e"], [" ", "t"], ["w", "o"], []]
    assert [one["text_offset"] for one in lists] == [[0], [1, 2], [3, 4], [5, 6], []]
    assert usage["usage"]["completion_tokens"] == 7


def test_batches_of_strings_and_ids_keep_their_order(api, engine) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[ord(letter)] for letter in "abcd"]
    body = api.complete(prompt=["x", "yy"], n=2, max_tokens=1).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate("abcd"))
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4
    engine.requests.clear()
    assert len(api.complete(prompt=[[1, 2], [3]], max_tokens=1).json()["choices"]) == 2
    assert [request.token_ids for request in engine.requests] == [(1, 2), (3,)]
    engine.requests.clear()
    api.complete(prompt=[65, 66], max_tokens=1)
    assert [request.token_ids for request in engine.requests] == [(65, 66)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_with_logprobs_scores_the_prompt(api, engine, read_events, is_streamed) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[ord("z")]]
    fields = {"prompt": "aé", "echo": True, "logprobs": 1, "max_tokens": 1}
    if is_streamed:
        parts = [e["choices"][0] for e in read_events(api.complete(stream=True, **fields))[:-1]]
        text = "".join(part["text"] for part in parts)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {k: [x for p in parts for x in p["logprobs"][k]] for k in names}
    else:
        (choice,) = api.complete(**fields).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "aéz"
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "z"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"z": -0.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2]


def test_scoring_alone_generates_nothing(api, engine) -> None:  # type: ignore[no-untyped-def]
    (choice,) = api.complete(prompt=[97, 98], echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["finish_reason"] == "length"


def test_the_default_limit_is_sixteen_tokens(api, engine) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[65] * 50]
    assert api.complete(prompt="x").json()["choices"][0]["text"] == "A" * 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [300]}, None),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_bad_fields_are_named(api, engine, script, fields, param) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[65]]
    response = api.complete(**fields)
    if param is None:
        assert response.status_code == 200  # a special token's id is a fine prompt
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_ignore_eos_goes_on_to_max_tokens(api, engine, tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [[*b"one", tokenizer.eos_id, *b"two"]]
    (whole,) = api.complete(prompt="x", ignore_eos=True, max_tokens=6).json()["choices"]
    assert (whole["text"], whole["finish_reason"]) == ("onetw", "length")
    (cut,) = api.complete(prompt="x", max_tokens=6).json()["choices"]
    assert (cut["text"], cut["finish_reason"]) == ("one", "stop")
