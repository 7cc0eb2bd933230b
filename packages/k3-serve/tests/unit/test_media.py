"""Image parts: decoded from data URLs, refused before decoding when too large."""

import base64
import io

import pytest
import torch
from PIL import Image

from k3_serve.api.app import create_app
from k3_serve.limits import Limits
from k3_serve.ops.fetch import FetchError, MediaPolicy
from k3_serve.settings import Settings


def data_url(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def parts(*urls: str) -> list[dict]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "see "}, *images]}]


def test_images_become_pixels_and_prompts_in_order(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    assert api.chat(messages=parts(data_url(30, 20), data_url(56, 28))).status_code == 200
    (request,) = engine.requests
    assert request.images.grid_thws.tolist() == [[1, 2, 4], [1, 2, 4]]
    assert request.images.pixel_values.shape == (16, 3, 14, 14)
    assert torch.allclose(request.images.pixel_values[8:, 0], torch.ones(8, 14, 14))
    text = engine.tokenizer.decode(request.token_ids)
    assert text.index("image 30x20<|media_content|>") < text.index("image 56x28")
    assert list(request.token_ids).count(engine.tokenizer.media_pad_id) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/x.png", "data URLs"),
        ("file:///etc/passwd", "data URLs"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "no allowed format"),
        (data_url(200, 100), "at most 10000 pixels"),
    ],
)
def test_bad_images_are_refused_without_their_content(api, engine, url, message) -> None:  # type: ignore[no-untyped-def]
    response = api.chat(messages=parts(url))
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == "messages[0].content[1]"
    assert len(error["message"]) < 300
    assert not engine.requests


def test_a_video_is_chunks_of_frames_with_their_times(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    frames = [Image.new("RGB", (28, 28), (40 * i, 0, 0)) for i in range(6)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=500)
    url = "data:video/gif;base64," + base64.b64encode(buffer.getvalue()).decode()
    video = {"type": "video_url", "video_url": {"url": url}}
    image = {"type": "image_url", "image_url": {"url": data_url(56, 28)}}
    response = api.chat(messages=[{"role": "user", "content": [video, image]}])
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    assert request.images.grid_thws.tolist() == [[4, 2, 2], [2, 2, 2], [1, 2, 4]]
    assert len(request.images.pixel_values) == 16 + 8 + 8
    assert list(request.token_ids).count(engine.tokenizer.media_pad_id) == 3
    text = engine.tokenizer.decode(request.token_ids)
    assert "00:00:00.000<|media_begin|>video 28x28<|media_content|>" in text
    assert "00:00:02.000<|media_begin|>video 28x28<|media_content|>" in text
    assert text.index("00:00:02.000") < text.index("image 56x28")
    mp4 = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    refused = api.chat(messages=[{"role": "user", "content": [mp4]}])
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "no allowed format" in message
    assert "a video is an animated GIF or WebP, or its frames as image_url parts" in message


def test_an_image_may_come_from_a_tool(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    image = {"type": "image_url", "image_url": {"url": data_url(56, 28)}}
    text = {"type": "text", "text": "seen:"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text, image]},
    ]
    assert api.chat(messages=messages).status_code == 200
    (request,) = engine.requests
    assert request.images.grid_thws.tolist() == [[1, 2, 4]]
    prompt = engine.tokenizer.decode(request.token_ids)
    assert 'index="1"<|sep|>seen:<|media_begin|>image 56x28<|media_content|>' in prompt


def test_images_of_listed_hosts_are_fetched_once(  # type: ignore[no-untyped-def]
    engine, tokenizer, api_of, script, monkeypatch
) -> None:
    engine.scripts = [script("<|end_of_msg|>")]
    asked = []

    async def fetch_all(urls, policy):  # type: ignore[no-untyped-def]
        asked.extend(urls)
        if any("bad" in url for url in asked):
            raise FetchError("the host answered 404")
        return {url: base64.b64decode(data_url(30, 20).partition(",")[2]) for url in asked}

    monkeypatch.setattr("k3_serve.api.media.fetch_all", fetch_all)
    policy = MediaPolicy(frozenset({"images.example.com"}))
    api = api_of(create_app(engine, tokenizer, "scripted", Settings(media=policy)))
    url = "https://images.example.com/a.png"
    response = api.chat(messages=parts(url, data_url(56, 28)))
    assert response.status_code == 200, response.text
    assert asked == [url]
    assert engine.requests[0].images.grid_thws.tolist() == [[1, 2, 4], [1, 2, 4]]
    refused = api.chat(messages=parts("https://images.example.com/bad.png"))
    assert refused.status_code == 400
    assert "404" in refused.json()["error"]["message"]
    assert len(engine.requests) == 1


def test_too_many_images_are_refused(api) -> None:  # type: ignore[no-untyped-def]
    response = api.chat(messages=parts(*[data_url(4, 4)] * 3))
    assert "3 images; at most 2" in response.json()["error"]["message"]


def test_an_image_without_a_url_is_refused(api) -> None:  # type: ignore[no-untyped-def]
    content = [{"type": "image_url", "image_url": {}}]
    response = api.chat(messages=[{"role": "user", "content": content}])
    assert response.json()["error"]["param"] == "messages[0].content[0]"


def test_images_are_bounded_together(engine, tokenizer, script, api_of) -> None:  # type: ignore[no-untyped-def]
    """Each is small enough; together they would not be, which their headers show."""
    engine.scripts = [script("<|end_of_msg|>")]
    settings = Settings(Limits(max_image_pixels=5000, max_request_pixels=9000))
    api = api_of(create_app(engine, tokenizer, "scripted", settings))
    assert api.chat(messages=parts(data_url(50, 80), data_url(50, 80))).status_code == 200
    response = api.chat(messages=parts(data_url(50, 80), data_url(50, 80), data_url(50, 80)))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[3]"
    assert "at most 1000 pixels" in error["message"]
    text = api.request("GET", "/metrics").text
    assert 'k3_media_rejected_total{model="scripted",reason="image"} 1.0' in text
