"""Keys: every route but /health is closed, and no key shows anywhere (serving 8)."""

import base64
import logging

import pytest

from k3_core.errors import K3Error
from k3_serve.api.app import create_app
from k3_serve.ops.auth import KeyRing
from k3_serve.settings import Settings

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"
ANSWER = "<|close|>think<|sep|><|open|>response<|sep|>four<|close|>response<|sep|><|end_of_msg|>"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def app(engine, tokenizer, script):  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    return create_app(engine, tokenizer, "scripted", Settings(keys=KeyRing([FIRST, SECOND])))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def every_route(app) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    routes = [(m, r.path) for r in app.routes for m in getattr(r, "methods", None) or ()]
    return sorted({*routes, ("GET", "/nowhere"), ("POST", "/"), ("GET", "/docs")})


def test_every_route_but_health_needs_a_key(app, api, engine) -> None:  # type: ignore[no-untyped-def]
    routes = every_route(app)
    assert {path for _, path in routes} >= {"/health", "/ready", "/metrics", "/v1/models", "/docs"}
    for method, path in routes:
        response = api.request(method, path)
        if path == "/health":
            assert response.status_code == 200
            continue
        assert response.status_code == 401, path
        assert response.headers.get_list("www-authenticate")[0].startswith("Bearer")
        if method != "HEAD":
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert not engine.requests


@pytest.mark.parametrize(
    "path", ["//health", "/health/", "/health/../metrics", "/%68ealth/x", "/Health", "/health;x"]
)
def test_no_spelling_of_the_open_path_opens_another(api, path) -> None:  # type: ignore[no-untyped-def]
    assert api.request("GET", path).status_code == 401


@pytest.mark.parametrize("headers", [bearer(FIRST), bearer(SECOND), basic(f"me:{FIRST}")])
def test_each_key_is_let_in(api, headers) -> None:  # type: ignore[no-untyped-def]
    response = api.request("POST", "/v1/chat/completions", json=BODY, headers=headers)
    assert response.status_code == 200
    assert api.request("GET", "/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(FIRST[:-1]),
        bearer(FIRST + "x"),
        bearer(FIRST.upper()),
        bearer(f"{FIRST},{SECOND}"),
        bearer(""),
        {"Authorization": FIRST},
        {"Authorization": f"Token {FIRST}"},
        {"X-Api-Key": FIRST},
        basic(FIRST),
        {"Authorization": "Basic @@@"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_no_other_key_is_let_in(api, headers) -> None:  # type: ignore[no-untyped-def]
    response = api.request("GET", "/v1/models", headers=headers)
    assert response.status_code == 401
    assert FIRST not in response.text


def test_two_authorizations_are_none(api) -> None:  # type: ignore[no-untyped-def]
    headers = [*bearer("x" * 20).items(), *bearer(FIRST).items()]
    assert api.request("GET", "/v1/models", headers=headers).status_code == 401


def test_without_keys_everybody_is_let_in(engine, tokenizer, api_of) -> None:  # type: ignore[no-untyped-def]
    api = api_of(create_app(engine, tokenizer, "scripted"))
    assert api.request("GET", "/v1/models").status_code == 200


def test_keys_come_from_the_environment_and_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n  {SECOND}  \n")
    ring = KeyRing.read("KEYS", file, {"KEYS": f" {FIRST} ,, "})
    tenants = [ring.tenant_of(key.encode()) for key in (FIRST, SECOND)]
    assert len(ring) == 2
    assert None not in tenants
    assert tenants[0] != tenants[1]
    assert ring.tenant_of(b"# of the team") is None
    assert not KeyRing.read("KEYS", None, {})


def test_a_tenant_is_the_same_in_every_process() -> None:
    """It seeds the keys of caches on disk, which outlive a process and an order of keys."""
    assert KeyRing([SECOND, FIRST]).tenant_of(FIRST.encode()) == "030647c5eeef"


def test_a_bad_key_or_file_is_named_and_not_shown(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for bad in ("short", "sch\u00f6n-0123456789-0123", "tab\t0123456789-0123456789"):
        with pytest.raises(K3Error, match="key 2 has") as caught:
            KeyRing([FIRST, bad])
        assert bad not in str(caught.value)
    with pytest.raises(K3Error, match="cannot read keys from"):
        KeyRing.read("KEYS", tmp_path / "absent", {})
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(K3Error, match="has no key"):
        KeyRing.read("KEYS", empty, {})


def test_no_log_and_no_representation_has_a_key_or_content(api, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level(logging.DEBUG)
    secret = "the prompt is secret"
    body = {**BODY, "messages": [{"role": "user", "content": secret}]}
    for headers in (bearer(FIRST), bearer("wrong-key-0123456789")):
        api.request("POST", f"/v1/chat/completions?q={secret}", json=body, headers=headers)
        api.request("GET", f"/v1/models/{secret}%0Aforged line", headers=headers)
    lines = [r.getMessage() for r in caplog.records if r.name == "k3_serve.access"]
    assert len(lines) == 4
    for text in (FIRST, "wrong-key", secret, "forged", "four"):
        assert text not in "\n".join(
            r.getMessage() for r in caplog.records if "httpx" not in r.name
        )
    assert "POST /v1/chat/completions 200" in lines[0]
    assert "tenant=030647c5eeef" in lines[0]
    assert lines[2].split()[3:4] == ["401"]
    assert FIRST not in repr(Settings(keys=KeyRing([FIRST])))


def test_every_answer_has_its_own_id(api) -> None:  # type: ignore[no-untyped-def]
    ids = [api.request("GET", path).headers["X-Request-Id"] for path in ("/health", "/x", "/x")]
    assert len(set(ids)) == 3
