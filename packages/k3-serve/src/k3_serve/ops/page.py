"""The page at `/`: a chat box made of three static files, with a strict content policy."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
}
HEADERS = {
    # Whatever a model writes, nothing but the files of this server can run or be loaded.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Adds the page's routes; like every other, they are behind the keys."""
    folder = files("k3_serve") / "page"
    for path, (name, media_type) in FILES.items():
        content = (folder / name).read_bytes()
        app.add_api_route(path, _route(content, media_type), include_in_schema=False)


def _route(content: bytes, media_type: str):  # type: ignore[no-untyped-def]
    async def page() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return page
