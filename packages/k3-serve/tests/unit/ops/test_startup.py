"""What a start refuses before it loads, and `k3 serve` as a process that drains."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.checkpoint.folder import CheckpointFolder
from k3_core.checkpoint.headers import TensorEntry
from k3_core.cli.app import run as run_command
from k3_core.errors import K3Error
from k3_serve.ops import startup
from k3_serve.ops.auth import ADMIN_KEYS, API_KEYS, KeyRing
from k3_serve.ops.command import AdminPlane, check_exposure
from k3_serve.ops.run import Tls, bind, bind_unix

KEY, ADMIN_KEY = "client-key-0123456789", "admin-key-0123456789"
NEVER_STOP = {str(special): -100 for special in range(256, 290)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):  # type: ignore[no-untyped-def]
    config = K3Config.preset("k3-test")
    model = K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    model.save_pretrained(path, tokenizer=tokenizer)
    return path


def entry(name: str, shape: tuple[int, ...], num_bytes: int) -> TensorEntry:
    return TensorEntry(name, "U8", shape, Path(), 0, num_bytes)


def test_weights_are_counted_as_loaded() -> None:
    plain = entry("a.weight", (3, 5), 30)
    packed = entry("w1.weight_packed", (4, 16), 64)  # 4 rows of 32 values
    scale = entry("w1.weight_scale", (4, 1), 4)
    entries = [plain, packed, scale]
    assert startup.weight_bytes(entries, "float32", "packed") == 15 * 4 + 64 + 4
    assert startup.weight_bytes(entries, "bfloat16", "dequantized") == 15 * 2 + 4 * 32 * 2


def test_the_count_is_that_of_a_loaded_model(folder) -> None:  # type: ignore[no-untyped-def]
    model = K3ForConditionalGeneration.from_pretrained(folder)
    loaded = sum(p.numel() * p.element_size() for p in model.parameters())
    counted = startup.weight_bytes(
        CheckpointFolder.open(folder).entries.values(), "float32", "packed"
    )
    assert counted == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize(("free", "is_enough"), [(2**20, False), (2**40, True), (None, True)])
def test_too_little_memory_is_said_before_loading(folder, monkeypatch, free, is_enough) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(startup, "available_bytes", lambda device: free)
    options = {"device": "cpu", "dtype": "float32", "experts": "packed"}
    opened = CheckpointFolder.open(folder)
    monkeypatch.setattr(startup, "weight_bytes", lambda *_: 2**30)
    if is_enough:
        line = startup.check_memory(opened, **options)
        assert ("not known" in line) == (free is None)
        return
    with pytest.raises(K3Error, match=r"weights take 1\.00 GiB and cpu has 0\.00 GiB free"):
        startup.check_memory(opened, **options)


def test_free_memory_is_the_smaller_of_machine_and_container(tmp_path) -> None:  # type: ignore[no-untyped-def]
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:  40 kB\n")
    assert startup._free_of_machine(meminfo) == 40 * 1024
    assert startup._free_of_machine(tmp_path / "absent") is None
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 5\ninactive_file 300")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert startup._free_of_group(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max")
    assert startup._free_of_group(tmp_path) is None
    assert startup.available_bytes("mps") is None
    assert startup.available_bytes("cpu") is None or startup.available_bytes("cpu") > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host) -> None:  # type: ignore[no-untyped-def]
    check_exposure(host, KeyRing(), False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "server.example", ""])
def test_an_address_that_others_reach_needs_a_key(host) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(K3Error, match="there are no keys; set K3_API_KEYS"):
        check_exposure(host, KeyRing(), False)
    check_exposure(host, KeyRing([KEY]), False)
    check_exposure(host, KeyRing(), True)


def test_a_taken_port_and_a_unix_socket(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(K3Error, match=rf"cannot listen on 127.0.0.1:{port}.*another --port"):
            bind("127.0.0.1", port)
    path = tmp_path / "admin.sock"
    with bind_unix(path) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        listener.listen()
        with pytest.raises(K3Error, match="cannot listen on"):
            bind_unix(path)
    with bind_unix(path):  # of a process that is gone
        pass
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(K3Error, match="cannot listen on"):
        bind_unix(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "not a socket"


def test_admin_options_are_checked(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv(ADMIN_KEYS, raising=False)
    assert AdminPlane.read(None, None, None, ()) is None
    with pytest.raises(K3Error, match="needs a key"):
        AdminPlane.read(0, None, None, ())
    monkeypatch.setenv(ADMIN_KEYS, ADMIN_KEY)
    with pytest.raises(K3Error, match="not both"):
        AdminPlane.read(0, tmp_path / "s", None, ())
    with pytest.raises(K3Error, match="is not a folder"):
        AdminPlane.read(0, None, None, [tmp_path / "absent"])


def test_tls_files_are_checked(certificate, tmp_path) -> None:  # type: ignore[no-untyped-def]
    cert, key = map(Path, certificate("k3.example"))
    _, other = map(Path, certificate("other.example"))
    assert Tls.read(None, None) is None
    assert Tls.read(cert, key) == Tls(cert, key)
    for pair in ((cert, None), (None, key), (cert, other), (tmp_path / "absent", key)):
        with pytest.raises(K3Error, match=r"TLS needs both|cannot use"):
            Tls.read(*pair)


class Process:
    """`k3 serve` on a free port."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "k3_core.cli.app", "serve", str(folder), "--port", "0"]
        clean = {k: v for k, v in os.environ.items() if k not in (API_KEYS, ADMIN_KEYS)}
        self.popen = subprocess.Popen(
            [*command, "--threads", "1", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, **environment},
        )
        self.said = ""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def wait(self) -> int:
        """The port, once it listens."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said += line
            if found := re.search(r"listening on https?://127\.0\.0\.1:(\d+)", line):
                return int(found[1])
        raise AssertionError(self.said)

    def end(self) -> tuple[int, str]:
        """The exit code and everything that was said."""
        assert self.popen.stdout is not None
        self.said += self.popen.stdout.read()
        return self.popen.wait(30), self.said


def ask(port: int, method: str, path: str, body=None, key: str = KEY):  # type: ignore[no-untyped-def]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return connection.getresponse()


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["--host", "0.0.0.0"], {}, "there are no keys"),
        ([], {API_KEYS: "short"}, "key 1 has 5 characters"),
        ([], {}, "cannot listen on 127.0.0.1"),
        (["--media-host", "169.254.169.254"], {}, "is not a host name"),
        (["--admin-port", "0"], {}, "the admin plane needs a key"),
        (["--tls-cert", "x.pem"], {}, "TLS needs both"),
        (["--log-level", "loud"], {}, "log level 'loud' is not one of"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(  # type: ignore[no-untyped-def]
    folder, monkeypatch, capsys, options, environment, message
) -> None:
    for name in (API_KEYS, ADMIN_KEYS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = run_command(["serve", str(folder), "--port", port, *options])
    said = "".join(capsys.readouterr())
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


def test_sigterm_lets_a_stream_end_and_exits_with_0(folder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Over the whole of a life: keys, the admin plane on a Unix socket, weights, drain."""
    plane = tmp_path / "admin.sock"
    options = ["--admin-socket", str(plane), "--weights-root", str(folder), "--log-level", "info"]
    with Process(folder, *options, **{API_KEYS: KEY, ADMIN_KEYS: ADMIN_KEY}) as process:
        port = process.wait()
        assert re.search(r"mla_decode +mla_decode\.numba by auto", process.said)
        assert "memory: weights take" in process.said
        assert f"admin plane on {plane}" in process.said
        assert ask(port, "GET", "/health", key="").status == 200
        assert ask(port, "GET", "/v1/models", key=ADMIN_KEY).status == 401
        change = {"path": str(folder / "model.safetensors"), "version": 7}
        assert admin(plane, "/update_weights", change, KEY)[0] == 401
        assert admin(plane, "/update_weights", change, ADMIN_KEY)[0] == 200
        assert json.load(ask(port, "GET", "/version"))["weights_version"] == 7
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
        response = ask(port, "POST", "/v1/completions", {**body, "logit_bias": NEVER_STOP})
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        process.popen.send_signal(signal.SIGTERM)
        lines = response.read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        code, said = process.end()
    assert code == 0
    assert not plane.exists()
    assert KEY not in said
    assert "POST /v1/completions 200" in said


def admin(plane: Path, path: str, body: object, key: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(plane))
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_drain_has_an_end(folder) -> None:  # type: ignore[no-untyped-def]
    with Process(folder, "--drain", "0") as process:
        port = process.wait()
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 400, "stream": True, "n": 8}
        response = ask(port, "POST", "/v1/completions", {**body, "logit_bias": NEVER_STOP})
        response.readline()
        process.popen.send_signal(signal.SIGTERM)
        rest = []
        with contextlib.suppress(OSError, http.client.HTTPException):
            rest += iter(response.readline, b"")
        code, _ = process.end()
    assert code == 0
    assert b"data: [DONE]\n" not in rest  # it was cut off
