"""The page at `/` and its files, for anyone that reaches the server: they are the same on each."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

PAGE_FILES = {"/": "index.html", "/page/page.js": "page.js", "/page/page.css": "page.css", "/page/icon.svg": "icon.svg"}
"""Files by path. They need no key."""
_MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy: everything is from this server, and no other page can show it in a frame."""


def add_page(app: FastAPI) -> None:
    for path, name in PAGE_FILES.items():
        _add_file(app, path, name)


def _add_file(app: FastAPI, path: str, name: str) -> None:
    content = files("tilework.server.page").joinpath("built", name).read_bytes()
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",  # Browsers ask each time whether it is the same: after an update it is not.
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    @app.get(path, include_in_schema=False)
    async def file(http: Request) -> Response:
        if http.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)
