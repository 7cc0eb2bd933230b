"""Whether the server can take requests now, and why not: draining, asleep or failed."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from k3_core.engine import Engine
from k3_serve.api.errors import ApiError

MESSAGES = {
    "draining": "the server is about to end; ask another one",
    "asleep": "the engine is asleep; wake it through the admin plane",
}


class ServerState:
    """Set by the drain and the admin plane, read by health, readiness and the gate."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_draining = False
        self.is_asleep = False

    @property
    def name(self) -> str:
        """ready, draining, asleep or failed."""
        if self.is_draining:
            return "draining"
        if self.is_asleep:
            return "asleep"
        return "ready" if getattr(self._engine, "is_alive", True) else "failed"


class ReadyGate:
    """ASGI middleware: new work gets 503 while the server drains or sleeps; GET is answered.

    An engine of which only faults came is still asked: what it answers shows whether it works.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["method"] == "POST"
        if not is_work or (name := self._state.name) not in MESSAGES:
            await self._app(scope, receive, send)
            return
        refused = ApiError(503, MESSAGES[name], code=name, headers={"Retry-After": "1"})
        await refused.response(scope, receive, send)
