"""Health, readiness and version; what a server that is not ready answers."""

import pytest

from k3_serve import __about__


def statuses(api) -> tuple[int, int, int]:  # type: ignore[no-untyped-def]
    get = [api.request("GET", path).status_code for path in ("/health", "/ready")]
    return (*get, api.chat().status_code)


@pytest.fixture
def state(app):  # type: ignore[no-untyped-def]
    return app.state.server


def test_a_ready_server_says_so(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    assert statuses(api) == (200, 200, 200)
    assert api.request("GET", "/health").json() == {"status": "ok"}
    assert api.request("GET", "/ready").json() == {"status": "ready"}
    version = api.request("GET", "/version").json()
    expected = {"version": __about__.__version__, "model": "scripted", "weights_version": 0}
    assert version == expected


@pytest.mark.parametrize("reason", ["draining", "asleep"])
def test_no_work_is_taken_while_draining_or_asleep(api, engine, state, reason) -> None:  # type: ignore[no-untyped-def]
    setattr(state, f"is_{reason}", True)
    assert statuses(api) == (200, 503, 503)
    response = api.chat()
    assert response.json()["error"]["code"] == reason
    assert response.headers["Retry-After"] == "1"
    assert api.request("GET", "/v1/models").status_code == 200
    assert not engine.requests
    setattr(state, f"is_{reason}", False)
    assert api.request("GET", "/ready").status_code == 200


def test_a_dead_engine_fails_health_and_nothing_more_is_said(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.is_alive, engine.scripts = False, [script("<|end_of_msg|>")]
    assert statuses(api) == (503, 503, 200)
    assert api.request("GET", "/health").json() == {"status": "failed"}


def test_other_origins_are_let_in_only_when_listed(engine, tokenizer, api_of) -> None:  # type: ignore[no-untyped-def]
    from k3_serve.api.app import create_app
    from k3_serve.ops.auth import KeyRing
    from k3_serve.settings import Settings

    ring = KeyRing(["a-key-of-the-page-123"])
    settings = Settings(keys=ring, cors_origins=("https://page.example",))
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "Authorization",
    }
    for origin, is_allowed in (("https://page.example", True), ("https://evil.example", False)):
        api = api_of(create_app(engine, tokenizer, "scripted", settings))
        headers = {"Origin": origin, **ask}
        response = api.request("OPTIONS", "/v1/chat/completions", headers=headers)
        assert (response.status_code == 200) == is_allowed
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (origin if is_allowed else None)
    closed = api_of(create_app(engine, tokenizer, "scripted", Settings(keys=ring)))
    response = closed.request("OPTIONS", "/v1/models", headers={"Origin": "https://x.org", **ask})
    assert response.status_code == 401
    assert "access-control-allow-origin" not in response.headers


def test_the_api_has_no_admin_route(api) -> None:  # type: ignore[no-untyped-def]
    for path in ("/sleep", "/wake", "/update_weights", "/stats", "/admin/sleep"):
        assert api.request("POST", path, json={}).status_code == 404
