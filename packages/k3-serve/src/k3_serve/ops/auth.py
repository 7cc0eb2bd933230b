"""API keys: who may ask, default-deny on every route (serving 8).

Keys come from the environment or a file, never from the command line, where every user of the
machine could read them. Only digests are kept, and no log, error or metric shows a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from k3_core.errors import K3Error
from k3_serve.api.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
MIN_KEY_LENGTH = 16
API_KEYS, ADMIN_KEYS = "K3_API_KEYS", "K3_ADMIN_KEYS"
TENANT = "k3_tenant"


class KeyRing:
    """The keys that are accepted. Without any, everybody is let in as the tenant ""."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises K3Error for a key that is short or not plain ASCII, without showing it."""
        self._tenants: dict[bytes, str] = {}
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
                raise K3Error(
                    f"key {number} has {len(key)} characters; a key has at least "
                    f"{MIN_KEY_LENGTH}, all printable ASCII: make one with `openssl rand -hex 24`"
                )
            self._tenants[_digest(key.encode())] = _tenant(key)

    @classmethod
    def read(
        cls, variable: str, file: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> KeyRing:
        """The keys of an environment variable (separated by commas) and of a file, one a line.

        Empty lines and lines that begin with # are left out. K3Error when the file cannot be
        read or has no key.
        """
        environ = os.environ if environ is None else environ
        keys = [key.strip() for key in environ.get(variable, "").split(",") if key.strip()]
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text("ascii").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise K3Error(f"cannot read keys from {file}: {error}; one key a line") from error
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise K3Error(f"{file} has no key; write one a line")
            keys += found
        return cls(keys)

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    def tenant_of(self, key: bytes) -> str | None:
        """The tenant of a key, None when it is unknown; takes the same time for every key."""
        given, found = _digest(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def tenant_of(scope: Scope) -> str:
    """The tenant that a request was let in as: seeds its cache keys, names it in logs."""
    return str(scope.get(TENANT, ""))


class RequireKey:
    """ASGI middleware: 401 without a known key, on every path but those that are open.

    The key is a bearer token. A browser, which cannot send one for a page, may give it as the
    password of HTTP basic authentication.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys:
            await self._app(scope, receive, send)
            return
        key = _given_key(scope)
        tenant = None if key is None else self._keys.tenant_of(key)
        if tenant is not None:
            scope[TENANT] = tenant
        elif scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} without a key")  # the server closes it
        elif scope["path"] not in self._open_paths:
            await _refusal(key is None)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(is_missing: bool) -> JSONResponse:
    problem = "no API key was given" if is_missing else "the API key is not known"
    message = f"{problem}; send `Authorization: Bearer KEY`"
    response = ApiError(401, message, code="invalid_api_key").response
    response.headers.append("WWW-Authenticate", "Bearer")
    response.headers.append("WWW-Authenticate", 'Basic realm="k3", charset="UTF-8"')
    return response


def _given_key(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:  # two of them may be read differently by a proxy in front
        return None
    scheme, _, rest = values[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(rest.strip())
    if scheme.lower() != b"basic":
        return None
    try:
        _, colon, password = base64.b64decode(rest.strip(), validate=True).partition(b":")
    except binascii.Error:
        return None
    return password if colon else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant(key: str) -> str:
    """A name that is the same in every process and says nothing of the key."""
    return hashlib.blake2b(key.encode(), digest_size=6, person=b"k3-tenant").hexdigest()
