"""A client of an OpenAI-compatible server, on the standard library alone (serving 4c)."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from k3_core.errors import K3Error


class ChatClient:
    """Talks to the server at `url`, such as http://127.0.0.1:8000. Times are in seconds."""

    def __init__(self, url: str, timeout: float = 120.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise K3Error(f"{url!r} is not an http address; use one like http://127.0.0.1:8000")
        is_secure = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self.url = url

    def wait_until_healthy(self, seconds: float, is_alive: Callable[[], bool]) -> None:
        """Polls /health; K3Error when the server dies or does not answer in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive():
                raise K3Error("the server ended before it answered")
            try:
                self._get("/health")
                return
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
        raise K3Error(f"the server at {self.url} did not answer within {seconds:g} s")

    def model(self) -> str:
        """The name of the first model that the server has."""
        try:
            return str(self._get("/v1/models")["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise K3Error(f"no server answers at {self.url} ({error}); start `k3 serve`") from error

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat; K3Error with the server's message when it refuses."""
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            headers = {"Content-Type": "application/json"}
            payload = json.dumps({**body, "stream": True})
            connection.request("POST", f"{self._base}/v1/chat/completions", payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise K3Error(_message(response.status, response.read()))
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise K3Error(f"the connection to {self.url} failed: {error}") from error
        finally:
            connection.close()

    def _get(self, path: str) -> Any:
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("GET", self._base + path)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise http.client.HTTPException(_message(response.status, data))
            return json.loads(data)
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise K3Error(f"the server broke off: {chunk['error']['message']}")
        yield chunk
    raise K3Error("the server closed the stream before its end")


def _message(status: int, data: bytes) -> str:
    try:
        return f"the server answered {status}: {json.loads(data)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {data[:200]!r}"
