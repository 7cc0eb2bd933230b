"""Certificates and a TLS server for the tests of what surrounds the API."""

from __future__ import annotations

import functools
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Files = tuple[str, str]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """Makes a certificate for a name that signs itself, and its key; both as file names."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    folder: Path = tmp_path_factory.mktemp("tls")

    @functools.cache
    def make(name: str) -> Files:
        cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        names = ["-subj", "/CN=test", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
        files = ["-out", cert, "-keyout", key]
        subprocess.run([*command, *names, *files], check=True, capture_output=True)
        return cert, key

    return make


@pytest.fixture
def tls_echo() -> Iterator[Callable[[str, str, bytes], int]]:
    """Starts a TLS server on loopback that answers one request with a body; returns its port."""
    threads: list[threading.Thread] = []

    def start(cert: str, key: str, body: bytes) -> int:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(10)

        def answer() -> None:
            with listener:
                raw, _ = listener.accept()
                try:
                    with context.wrap_socket(raw, server_side=True) as peer:
                        peer.recv(65536)
                        peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
                except OSError:
                    raw.close()  # the client did not like the certificate

        threads.append(threading.Thread(target=answer, daemon=True))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for thread in threads:
        thread.join(10)
