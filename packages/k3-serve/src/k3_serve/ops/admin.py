"""The admin plane: an application of its own, on its own socket, with its own keys (serving 8).

New weights come as safetensors files below an allow-listed folder; request bytes are never
anything but JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from k3_core.engine import Engine
from k3_core.errors import K3Error
from k3_serve.__about__ import __version__
from k3_serve.api.errors import ApiError, bad_request, install
from k3_serve.api.schemas import Wire
from k3_serve.limits import Limits
from k3_serve.ops.auth import ADMIN_KEYS, KeyRing, RequireKey
from k3_serve.ops.log import AccessLog
from k3_serve.ops.requests import RequestLimit
from k3_serve.ops.state import ServerState

if TYPE_CHECKING:
    import torch

LIMITS = Limits(max_body_bytes=64 * 2**10, max_depth=8)


class WeightsRequest(Wire):
    """A safetensors file, or a folder of them; the version is one more than now by default."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[int, Field(ge=0, lt=2**63)] | None = None


def create_admin(
    engine: Engine, state: ServerState, keys: KeyRing, roots: Sequence[Path] = ()
) -> FastAPI:
    """The admin application. Raises K3Error without a key: this plane is never open."""
    if not keys:
        raise K3Error(
            f"the admin plane needs a key of its own; set {ADMIN_KEYS} or --admin-key-file"
        )
    app = FastAPI(title="k3-serve admin", version=__version__, openapi_url=None)
    app.add_middleware(RequestLimit, limits=LIMITS)
    app.add_middleware(RequireKey, keys=keys, open_paths=frozenset())
    install(app)
    app.add_middleware(AccessLog)
    gate = asyncio.Lock()  # one change at a time

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {"state": state.name, **asdict(engine.stats())}  # type: ignore[call-overload]

    @app.post("/sleep")
    async def sleep() -> dict[str, str]:
        async with gate:
            state.is_asleep = True
            try:
                await asyncio.to_thread(_method(engine, "sleep"))
            except Exception:
                state.is_asleep = False
                raise
        return {"state": state.name}

    @app.post("/wake")
    async def wake() -> dict[str, str]:
        async with gate:
            await asyncio.to_thread(_method(engine, "wake"))
            state.is_asleep = False
        return {"state": state.name}

    @app.post("/update_weights")
    async def update_weights(body: WeightsRequest) -> dict[str, int]:
        files = weight_files(body.path, roots)
        async with gate:
            version = engine.stats().version + 1 if body.version is None else body.version
            try:
                await asyncio.to_thread(engine.update_weights, read_weights(files), version)
            except ValueError as error:
                raise bad_request(str(error), "path") from error
        return {"version": version, "files": len(files)}

    return app


def _method(engine: Engine, name: str) -> Any:
    found = getattr(engine, name, None)
    if found is None:
        raise ApiError(501, f"this engine has no {name}; it is a {type(engine).__name__}")
    return found


def weight_files(path: str, roots: Sequence[Path]) -> list[Path]:
    """The safetensors files at a path, which must lie below a root, links resolved.

    Raises ApiError 403 for a path outside, whether or not it exists, and 400 for one without
    weights.
    """
    if not roots:
        raise ApiError(
            403, "no folder for weights is allowed; start with --weights-root", param="path"
        )
    try:
        found = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise bad_request("path is not a valid path", "path") from error
    allowed = [root.resolve() for root in roots]
    files = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    resolved = [file.resolve() for file in files]
    for file in (found, *resolved):
        if not any(file.is_relative_to(root) for root in allowed):
            raise ApiError(403, "path is outside the folders of --weights-root", param="path")
    if not resolved or not all(f.is_file() and f.suffix == ".safetensors" for f in resolved):
        raise bad_request("path is neither a .safetensors file nor a folder that has some", "path")
    return resolved


def read_weights(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files, one at a time; CheckpointError (a ValueError) for a bad file."""
    from k3_core.checkpoint.headers import read_header
    from k3_core.checkpoint.tensors import TensorReader

    headers = [read_header(file) for file in files]  # all are sound before the first is read
    with TensorReader() as reader:
        for header in headers:
            for name, entry in header.entries.items():
                yield name, reader.read(entry)
