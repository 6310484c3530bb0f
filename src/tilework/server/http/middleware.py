"""Checks and changes of a request before it is routed, and of its answer."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilework.server.http.errors import ApiError, internal_error, long_head
from tilework.server.tenants import Tenant, Tenants
from tilework.server.text import shown

logger = logging.getLogger("tilework.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
TENANT = "tilework.tenant"  # The key of the tenant in the scope.
KEY = "tilework.key"  # And that of the key with which it came.
IS_HEAD = "tilework.is_head"  # In the scope if the request was a HEAD.


def tenant_of(scope: Scope) -> Tenant:
    tenant = scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def key_of(scope: Scope) -> bytes:
    """The key that a request came with; empty without."""
    key = scope[KEY]
    assert isinstance(key, bytes)
    return key


def is_head(scope: Scope) -> bool:
    """Whether only the head of the answer was asked for; then answering must have no effects."""
    return IS_HEAD in scope


class CatchBugs:
    """Answer an unexpected exception with a 500; its traceback goes to the log, never to the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def sending(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if scope["type"] != "http" or has_started:
                raise
            logger.exception("%s %s failed", scope["method"], shown(scope["path"]))
            await internal_error().response()(scope, receive, send)


class RequireKey:
    """Let a request pass only with `Authorization: Bearer KEY`, and put key and tenant into the scope.

    A request whose tenant is in the scope already passes: it is a call of a batch.

    `OPEN_PATHS`, the probes of an orchestrator, need no key. The time that a check takes reveals nothing: see
    `Tenants.find`.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or TENANT in scope:
            await self._app(scope, receive, send)
        elif (tenant := self._tenants.find(key := _bearer(scope))) is not None:
            known = key if key in tenant.keys else None
            await self._app({**scope, TENANT: tenant, KEY: known or b""}, receive, send)
        else:
            await _unauthorised().response()(scope, receive, send)


class LimitHead:
    """Refuse a head of more than `max_bytes`: the HTTP server itself accepts one that arrives in one piece."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > self._max_bytes:
            await long_head(self._max_bytes).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class HeadAsGet:
    """Answer HEAD like GET; the HTTP server leaves the body out. `is_head` says that it was a HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope["raw_path"]) + len(scope["query_string"]) + fields


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _unauthorised() -> ApiError:
    message = 'The API key is missing or wrong. Send "Authorization: Bearer KEY" with a key of this server.'
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
