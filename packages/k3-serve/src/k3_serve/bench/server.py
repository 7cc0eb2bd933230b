"""A server of its own for a benchmark: `k3 serve`'s application in a second process.

The client keeps this process: two loops in one interpreter would wait for each other's lock. On
few cores they still share those.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from k3_core.errors import K3Error
from k3_serve.cli import model_name

if TYPE_CHECKING:
    from k3_core.engine import Engine
    from k3_core.tokenizer import K3Tokenizer

START_SECONDS = 120


@dataclass(frozen=True)
class OwnServer:
    """Which model the server has and how it runs; the names are those of `k3 serve`.

    Without `has_budgets` all requests are of one class: nothing keeps long prompts from taking
    the steps and slots of short ones.
    """

    model: str = "k3-nano"
    device: str = "cpu"
    dtype: str = "float32"
    experts: str = "packed"
    max_batch: int = 8
    threads: int = 0
    has_budgets: bool = True

    def engine(self) -> tuple[Engine, K3Tokenizer]:
        """Loads the model, in the process that serves it."""
        from k3_core.engine.load import load_model
        from k3_serve.engine.classes import CLASSES
        from k3_serve.engine.core import ContinuousEngine
        from k3_serve.ops.startup import set_threads

        set_threads(self.threads)
        model, tokenizer = load_model(
            self.model, device=self.device, dtype=self.dtype, experts=self.experts
        )
        one = replace(CLASSES[0], max_rows=CLASSES[-1].max_rows)
        classes = CLASSES if self.has_budgets else (one,)
        engine = ContinuousEngine(model, tokenizer, max_batch=self.max_batch, classes=classes)
        engine.prepare()
        return engine, tokenizer

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its address while the block lasts; K3Error when it does not come up."""
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(self, its), daemon=True)
        process.start()
        its.close()
        try:
            yield f"http://127.0.0.1:{_port(mine)}"
        finally:
            process.terminate()
            process.join()


def _port(connection: Connection) -> int:
    """The port that the server says it listens on."""
    try:
        if connection.poll(START_SECONDS):
            told = connection.recv()
            if isinstance(told, int):
                return told
            raise K3Error(f"the server did not start: {told}")
    except EOFError:
        raise K3Error("the server ended before it listened") from None
    raise K3Error(f"the server did not start within {START_SECONDS} s")


def _serve(server: OwnServer, connection: Connection) -> None:
    from k3_serve.api.app import create_app
    from k3_serve.ops.run import run
    from k3_serve.settings import Settings

    settings = Settings(drain_seconds=1.0)
    try:
        engine, tokenizer = server.engine()
    except K3Error as error:
        connection.send(str(error))
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(engine, tokenizer, model_name(server.model), settings)
        connection.send(listener.getsockname()[1])
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        run(app, listener, settings)


def _end_with(client: Connection) -> None:
    """Ends the server when the other end of the pipe does, however that happens."""
    try:
        client.recv()
    except EOFError:
        os.kill(os.getpid(), signal.SIGTERM)
