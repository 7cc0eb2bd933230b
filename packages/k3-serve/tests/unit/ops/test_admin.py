"""The admin plane: its own key, weights only from below a root, sleep and wake."""

import pytest
import torch
from safetensors.torch import save_file

from k3_core.engine import Stats
from k3_core.errors import K3Error
from k3_serve.ops.admin import create_admin, read_weights
from k3_serve.ops.auth import KeyRing
from k3_serve.ops.state import ServerState

KEY = "the-admin-key-0123456"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Engine:
    """Takes weights and sleeps; everything is written down."""

    def __init__(self) -> None:
        self.version = 4
        self.did: list[object] = []
        self.weights: dict[str, torch.Tensor] = {}

    def stats(self) -> Stats:
        return Stats(1, 2, 3, 0, 50, 60, self.version)

    def sleep(self) -> None:
        self.did.append("sleep")

    def wake(self) -> None:
        self.did.append("wake")

    def update_weights(self, named, version) -> None:  # type: ignore[no-untyped-def]
        weights = dict(named)
        if "unknown" in weights:
            raise ValueError("no weight is called 'unknown'")
        self.weights, self.version = weights, version


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def state(engine) -> ServerState:  # type: ignore[no-untyped-def]
    return ServerState(engine)


@pytest.fixture
def root(tmp_path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": torch.ones(2), "b": torch.arange(3.0)}, folder / "new.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    return folder


@pytest.fixture
def admin(engine, state, root, api_of):  # type: ignore[no-untyped-def]
    api = api_of(create_admin(engine, state, KeyRing([KEY]), [root]))

    def call(method: str, path: str, **fields):  # type: ignore[no-untyped-def]
        return api.request(method, path, **{"headers": HEADERS, **fields})

    return call


def test_the_plane_is_never_open(engine, state, admin) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(K3Error, match="needs a key"):
        create_admin(engine, state, KeyRing())
    for method, path in (
        ("GET", "/stats"),
        ("POST", "/sleep"),
        ("POST", "/wake"),
        ("POST", "/update_weights"),
        ("GET", "/health"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ):
        assert admin(method, path, headers={}).status_code == 401
        wrong = {"Authorization": "Bearer not-the-admin-key-1"}
        assert admin(method, path, headers=wrong).status_code == 401
    assert not engine.did


def test_stats_sleep_and_wake(admin, engine, state) -> None:  # type: ignore[no-untyped-def]
    stats = admin("GET", "/stats").json()
    assert (stats["state"], stats["num_running"], stats["version"]) == ("ready", 2, 4)
    assert admin("POST", "/sleep").json() == {"state": "asleep"}
    assert state.is_asleep
    assert admin("POST", "/wake").json() == {"state": "ready"}
    assert engine.did == ["sleep", "wake"]


def test_a_sleep_that_fails_leaves_the_server_ready(admin, engine, state) -> None:  # type: ignore[no-untyped-def]
    def fail() -> None:
        raise RuntimeError

    engine.sleep = fail
    assert admin("POST", "/sleep").status_code == 500
    assert state.name == "ready"


def test_an_engine_that_cannot_sleep_says_so(state, api_of) -> None:  # type: ignore[no-untyped-def]
    api = api_of(create_admin(object(), state, KeyRing([KEY])))  # type: ignore[arg-type]
    response = api.request("POST", "/sleep", headers=HEADERS)
    assert response.status_code == 501
    assert "this engine has no sleep" in response.json()["error"]["message"]


def test_weights_come_from_a_file_or_a_folder_below_the_root(admin, engine, root) -> None:  # type: ignore[no-untyped-def]
    response = admin("POST", "/update_weights", json={"path": str(root / "new.safetensors")})
    assert response.json() == {"version": 5, "files": 1}
    assert torch.equal(engine.weights["b"], torch.arange(3.0))
    save_file({"c": torch.ones(1)}, root / "more.safetensors")
    body = {"path": str(root), "version": 9}
    assert admin("POST", "/update_weights", json=body).json() == {"version": 9, "files": 2}
    assert set(engine.weights) == {"a", "b", "c"}


def test_a_path_outside_the_root_is_refused_whether_it_exists_or_not(admin, engine, root) -> None:  # type: ignore[no-untyped-def]
    link, folder = root / "link.safetensors", root / "linked"
    link.symlink_to(root.parent / "outside.safetensors")
    folder.symlink_to(root.parent)
    inner = root / "inner"
    inner.mkdir()
    (inner / "x.safetensors").symlink_to(root.parent / "outside.safetensors")
    for path in (
        "/etc/passwd",
        "/nowhere",
        f"{root}/../outside.safetensors",
        f"{root}-else/x.safetensors",
        "outside.safetensors",
        str(link),
        str(folder),
        str(inner),
    ):
        response = admin("POST", "/update_weights", json={"path": path})
        assert response.status_code == 403, path
        assert "outside the folders" in response.json()["error"]["message"]
    assert engine.version == 4


def test_what_is_no_safetensors_is_refused(admin, engine, root) -> None:  # type: ignore[no-untyped-def]
    (root / "model.pt").write_bytes(b"\x80\x02.")
    (root / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    empty = root / "empty"
    empty.mkdir()
    save_file({"unknown": torch.ones(1)}, root / "unknown.safetensors")
    for path, message in (
        (root / "model.pt", "neither a .safetensors file"),
        (root / "absent.safetensors", "neither a .safetensors file"),
        (empty, "neither a .safetensors file"),
        (root / "bad.safetensors", "bad.safetensors"),
        (root / "unknown.safetensors", "no weight is called"),
        ("\0", "not a valid path"),
    ):
        response = admin("POST", "/update_weights", json={"path": str(path)})
        assert (response.status_code, path) == (400, path)
        assert message in response.json()["error"]["message"]
    assert engine.version == 4
    for body in ({}, {"path": ""}, {"path": 3}, {"path": "x", "version": -1}, [1]):
        assert admin("POST", "/update_weights", json=body).status_code == 400
    pickled = {**HEADERS, "Content-Type": "application/octet-stream"}
    response = admin("POST", "/update_weights", content=b"\x80\x04.", headers=pickled)
    assert response.status_code == 400


def test_without_a_root_no_weights_are_taken(engine, state, root, api_of) -> None:  # type: ignore[no-untyped-def]
    api = api_of(create_admin(engine, state, KeyRing([KEY])))
    body = {"path": str(root / "new.safetensors")}
    response = api.request("POST", "/update_weights", json=body, headers=HEADERS)
    assert response.status_code == 403
    assert "--weights-root" in response.json()["error"]["message"]


def test_every_header_is_checked_before_a_tensor_is_given(root) -> None:  # type: ignore[no-untyped-def]
    (root / "zzz.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="zzz"):
        next(read_weights(sorted(root.glob("*.safetensors"))))
