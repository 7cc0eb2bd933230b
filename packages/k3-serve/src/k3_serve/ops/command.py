"""`k3 serve`: what can be refused is refused before the model is loaded, then load and serve."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from k3_core.checkpoint.folder import CheckpointFolder
from k3_core.checkpoint.source import resolve_source
from k3_core.engine import Engine
from k3_core.errors import K3Error
from k3_core.ops import OpSet
from k3_serve.cli import model_name
from k3_serve.ops.admin import create_admin
from k3_serve.ops.auth import ADMIN_KEYS, API_KEYS, KeyRing
from k3_serve.ops.metrics import Metrics
from k3_serve.ops.run import Tls, bind, bind_unix, run
from k3_serve.ops.sizes import CacheChoice
from k3_serve.ops.startup import check_memory, explain, set_threads
from k3_serve.ops.state import ServerState
from k3_serve.settings import Settings
from k3_serve.spec.choose import check_draft

if TYPE_CHECKING:
    from k3_serve.engine.core import ContinuousEngine

Say = Callable[[str], object]


@dataclass(frozen=True)
class ModelChoice:
    """Which model to serve, and how it runs."""

    model: str
    device: str
    dtype: str
    experts: str
    max_batch: int
    threads: int = 0
    draft: str | None = None
    draft_tokens: int = 4

    @property
    def name(self) -> str:
        """The name that clients use."""
        return model_name(self.model)


@dataclass(frozen=True)
class AdminPlane:
    """Where the admin plane listens (a port of 127.0.0.1 or a Unix socket), and for whom."""

    place: int | Path
    keys: KeyRing
    roots: tuple[Path, ...]

    @classmethod
    def read(
        cls, port: int | None, path: Path | None, key_file: Path | None, roots: Iterable[Path]
    ) -> AdminPlane | None:
        """None without a port or path; K3Error for both, for no key and for a missing folder."""
        if port is None and path is None:
            return None
        if port is not None and path is not None:
            raise K3Error("the admin plane has --admin-port or --admin-socket, not both")
        keys = KeyRing.read(ADMIN_KEYS, key_file)
        if not keys:
            raise K3Error(f"the admin plane needs a key: set {ADMIN_KEYS} or --admin-key-file")
        folders = tuple(roots)
        for folder in folders:
            if not folder.is_dir():
                raise K3Error(f"--weights-root {folder} is not a folder")
        return cls(path if port is None else port, keys, folders)  # type: ignore[arg-type]

    @contextmanager
    def listening(self) -> Iterator[tuple[socket.socket, str]]:
        """The bound socket and its address; the file of a Unix socket is gone afterwards."""
        if isinstance(self.place, Path):
            with bind_unix(self.place) as listener:
                try:
                    yield listener, str(self.place)
                finally:
                    self.place.unlink(missing_ok=True)
            return
        with bind("127.0.0.1", self.place) as listener:
            yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass(frozen=True)
class Server:
    """Everything that `k3 serve` was told."""

    model: ModelChoice
    host: str
    port: int
    settings: Settings
    is_open: bool = False
    tls: Tls | None = None
    admin: AdminPlane | None = None
    cache: CacheChoice = field(default_factory=CacheChoice)

    def run(self, say: Say) -> None:
        """Serves until a signal; K3Error, before anything listens, for what cannot work."""
        check_exposure(self.host, self.settings.keys, self.is_open)
        folder = CheckpointFolder.open(resolve_source(self.model.model))
        model = self.model
        if model.draft is not None:
            check_draft(model.draft, folder.config)
        memory = check_memory(folder, device=model.device, dtype=model.dtype, experts=model.experts)
        with ExitStack() as stack:
            listener = stack.enter_context(bind(self.host, self.port))
            admin = None
            if self.admin is not None:
                admin = stack.enter_context(self.admin.listening())
            metrics = Metrics(model.name, has_vllm_names=self.settings.has_vllm_names)
            app, engine, ops = self._load(stack, metrics)
            begin = time.monotonic()
            engine.prepare()
            memory += f"; decode steps took {time.monotonic() - begin:.1f} s to prepare"
            for line in (*explain(ops.resolutions), memory):
                say(line)
            state: ServerState = app.state.server
            plane = None
            if self.admin is not None and admin is not None:
                plane = create_admin(engine, state, self.admin.keys, self.admin.roots), admin[0]
                admin[0].listen()
                say(f"admin plane on {admin[1]}, {len(self.admin.keys)} keys")
            listener.listen()  # from here on, whoever connects is answered
            say(self._banner(engine, *listener.getsockname()[:2]))
            run(app, listener, self.settings, tls=self.tls, admin=plane)

    def _load(self, stack: ExitStack, metrics: Metrics) -> tuple[FastAPI, ContinuousEngine, OpSet]:
        from k3_core.engine.load import load_model
        from k3_serve.api.app import create_app
        from k3_serve.engine.core import ContinuousEngine

        model = self.model
        set_threads(model.threads)
        loaded, tokenizer = load_model(
            model.model, device=model.device, dtype=model.dtype, experts=model.experts
        )
        options = {"max_batch": model.max_batch, "draft": model.draft, **self.cache.options()}
        try:
            engine = ContinuousEngine(
                loaded,
                tokenizer,
                observer=metrics,
                draft_tokens=model.draft_tokens,
                **options,
            )
        except ValueError as error:
            raise K3Error(f"the engine cannot be made: {error}") from error
        stack.enter_context(engine)
        app = create_app(engine, tokenizer, model.name, self.settings, metrics)
        return app, engine, loaded.ops

    def _banner(self, engine: Engine, host: str, port: int) -> str:
        model, keys = self.model, len(self.settings.keys)
        scheme = "http" if self.tls is None else "https"
        shown = f"[{host}]" if ":" in host else host
        draft = f", draft {model.draft} of {model.draft_tokens} tokens" if model.draft else ""
        guard = f"{keys} keys" if keys else "no keys: everybody who reaches it is let in"
        return (
            f"{model.model} in {model.dtype} on {model.device}, context {engine.max_length} "
            f"tokens{draft}, {guard}, listening on {scheme}://{shown}:{port}"
        )


def check_exposure(host: str, keys: Sequence[object] | KeyRing, is_open: bool) -> None:
    """Raises K3Error for an address that others reach while there is no key."""
    if len(keys) or is_open or _is_loopback(host):
        return
    raise K3Error(
        f"{host} can be reached from outside and there are no keys; set {API_KEYS} or "
        "--api-key-file, listen on 127.0.0.1, or say --without-keys"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
