"""/health, /ready, /version and /metrics (serving 2a and 9e)."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from k3_core.engine import Engine
from k3_serve.__about__ import __version__
from k3_serve.ops.collect import EngineCollector
from k3_serve.ops.metrics import CONTENT_TYPE, Metrics
from k3_serve.ops.state import ServerState


def add_status(
    app: FastAPI, engine: Engine, model_id: str, metrics: Metrics, state: ServerState
) -> None:
    """Adds the four routes. /health needs no key, so it says no more than ok or failed."""

    @app.get("/health")
    async def health() -> JSONResponse:
        has_failed = state.name == "failed"
        return JSONResponse(
            {"status": "failed" if has_failed else "ok"}, 503 if has_failed else 200
        )

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"status": state.name}, 200 if state.name == "ready" else 503)

    @app.get("/version")
    async def version() -> dict[str, str | int]:
        weights = engine.stats().version
        return {"version": __version__, "model": model_id, "weights_version": weights}

    @app.get("/metrics")
    def exposition() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    metrics.before_scrape(EngineCollector(engine, metrics))
