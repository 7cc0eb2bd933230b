"""Requests drawn from the OpenAPI document: never a 5xx, and answers as the document says."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from k3_core.engine import EventStream, Request
from k3_serve.api.app import create_app
from k3_serve.testing import Script, ScriptedEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
USER = {"role": "user", "content": "hi"}


class Obedient(ScriptedEngine):
    """Where a request has a constraint, the answer is 20 tokens that it allows."""

    def submit(self, request: Request) -> EventStream:
        if request.constraint is None:
            return super().submit(request)
        constraint, tokens = request.constraint.clone(), []
        while len(tokens) < 20 and not constraint.is_complete:
            mask = constraint.allowed_mask(self.tokenizer.vocab_size)
            tokens.append(int(mask.nonzero()[-1]))
            constraint.advance(tokens[-1])
        scripts, self.scripts = self.scripts, [Script(tokens)]
        try:
            return super().submit(request)
        finally:
            self.scripts = scripts


@pytest.fixture
def document(tokenizer, script):  # type: ignore[no-untyped-def]
    """The document of an application whose engine answers in turns or under constraints."""
    text = "hm<|close|>think<|sep|><|open|>response<|sep|>4<|end_of_msg|>"
    app = create_app(Obedient(tokenizer, [script(text)]), tokenizer, "scripted")
    return schemathesis.openapi.from_asgi("/openapi.json", app)


ROUTES = [
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
]


def aimed(case: Any) -> None:
    """Two requests in three get past the name of the model and the first message."""
    body = case.body
    if not isinstance(body, dict) or len(str(body)) % 3 == 0:
        return
    if "model" in body:
        body["model"] = "scripted"
    if isinstance(body.get("messages"), list):
        body["messages"] = [USER, *(m for m in body["messages"] if len(str(m)) % 2)]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_breaks_the_server(document, method, path) -> None:  # type: ignore[no-untyped-def]
    cases = document[path][method].as_strategy()

    @settings(suppress_health_check=list(HealthCheck), deadline=None)
    @given(cases)
    def check(case: Any) -> None:
        aimed(case)
        case.call_and_validate(checks=CHECKS)

    check()


def test_every_route_is_drawn_from(document) -> None:  # type: ignore[no-untyped-def]
    found = {
        (operation.ok().method.upper(), operation.ok().path)
        for operation in document.get_all_operations()
    }
    assert found - {("GET", "/metrics")} == set(ROUTES)
