"""Checks and changes of a request before it is routed, and of its answer."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilework.server.http.errors import ApiError, internal_error, long_head
from tilework.server.tenants import CurrentTenants, Tenant, Tenants
from tilework.server.text import shown

logger = logging.getLogger("tilework.server")

PROBES = frozenset({"/health", "/ready"})
METRICS = "/metrics"
DOCS = ("/docs", "/openapi.json")
"""Beginnings of paths that a person opens in a browser, which cannot send `Bearer`."""
PIECE_BYTES = 64 << 10
TENANT = "tilework.tenant"  # The key of the tenant in the scope.
TENANTS = "tilework.tenants"  # The key of all tenants, as they were when the request came.
KEY = "tilework.key"  # The key of the API key with which it came.
IS_HEAD = "tilework.is_head"  # In the scope if the request was a HEAD.


def tenant_of(scope: Scope) -> Tenant:
    tenant = scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def tenants_of(scope: Scope) -> Tenants:
    """Return all tenants as they were when the request came: the same for all of it, though others replace them."""
    tenants = scope[TENANTS]
    assert isinstance(tenants, Tenants)
    return tenants


def key_of(scope: Scope) -> bytes:
    """Return the key that a request came with; empty without one."""
    key = scope[KEY]
    assert isinstance(key, bytes)
    return key


def is_head(scope: Scope) -> bool:
    """Return whether only the head of the answer was asked for; then answering must have no effects."""
    return IS_HEAD in scope


class InPieces:
    """Passes large bodies to the HTTP server in pieces, so that it never buffers more than one that is not taken."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(view), PIECE_BYTES):
                is_last = start + PIECE_BYTES >= len(view)
                more = message.get("more_body", False) or not is_last
                await send({**message, "body": bytes(view[start : start + PIECE_BYTES]), "more_body": more})

        await self._app(scope, receive, sending)


class CatchBugs:
    """Answers an unexpected exception with a 500; its traceback goes to the log, never to the client."""

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
    """Passes a request on only with `Authorization: Bearer KEY`, and puts key, tenant and all tenants into the scope.

    A request whose tenant is in the scope already passes: it is a call of a batch.

    `open_paths` need no key. For `DOCS` a browser asks its user for the key, and sends it as the password of `Basic`.
    No other path takes that: a browser also sends it with requests that other sites make it send. A key of the scope
    metrics opens only `METRICS`. The time that a check takes reveals nothing: see `Tenants.find`.

    If there are several tenants, one may have `most_at_once` requests under way, so that connections are left for the
    others.
    """

    def __init__(self, app: ASGIApp, tenants: CurrentTenants, open_paths: Collection[str], most_at_once: int) -> None:
        self._app = app
        self._tenants = tenants
        self._open_paths = open_paths
        self._most_at_once = most_at_once
        self._num_under_way = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_docs = scope["type"] == "http" and scope["path"].startswith(DOCS)
        tenants = self._tenants.value
        if scope["type"] != "http" or scope["path"] in self._open_paths or TENANT in scope:
            await self._app(scope, receive, send)
        elif (tenant := tenants.find(key := _key(scope, takes_basic=is_docs))) is not None:
            if tenant.is_monitor and not (scope["path"] == METRICS and scope["method"] in ("GET", "HEAD")):
                await _metrics_only().response()(scope, receive, send)
                return
            if tenants.num_callers > 1 and self._num_under_way[tenant.name] >= self._most_at_once:
                await _too_many_at_once(self._most_at_once).response()(scope, receive, send)
                return
            known = key if key in tenant.keys else None
            with self._under_way(tenant):
                await self._app({**scope, TENANT: tenant, TENANTS: tenants, KEY: known or b""}, receive, send)
        else:
            await _unauthorised(takes_basic=is_docs).response()(scope, receive, send)

    @contextmanager
    def _under_way(self, tenant: Tenant) -> Iterator[None]:
        self._num_under_way[tenant.name] += 1
        try:
            yield
        finally:
            self._num_under_way[tenant.name] -= 1
            if not self._num_under_way[tenant.name]:  # Tenants come and go.
                del self._num_under_way[tenant.name]


class WhileStarting:
    """Answers with the `refusal`, if there is one; `open_paths` are not refused."""

    def __init__(self, app: ASGIApp, refusal: Callable[[], ApiError | None], open_paths: Collection[str]) -> None:
        self._app = app
        self._refusal = refusal
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        refusal = None if is_open else self._refusal()
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class LimitHead:
    """Refuses a head of more than `max_bytes`: the HTTP server itself accepts one that arrives in one piece."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > self._max_bytes:
            await long_head(self._max_bytes).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD like GET; the HTTP server leaves the body out. `is_head` tells that it was a HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope["raw_path"]) + len(scope["query_string"]) + fields


def _key(scope: Scope, *, takes_basic: bool) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            if takes_basic and scheme.lower() == b"basic":
                return _password(key.strip())
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _password(credentials: bytes) -> bytes | None:
    """Return the password in `name:password` in base64 (RFC 7617)."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return None


def _unauthorised(*, takes_basic: bool) -> ApiError:
    message = 'The API key is missing or wrong. Send "Authorization: Bearer KEY" with a key of this server.'
    scheme = 'Basic realm="Tilework: any name, and an API key as the password"' if takes_basic else "Bearer"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})


def _too_many_at_once(most: int) -> ApiError:
    message = (
        f"{most} requests of this tenant are under way, the most that one of several tenants may have. Retry in 1 "
        f"second,"
        ' or send calls with "Prefer: respond-async".'
    )
    headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(429, message, error_type="rate_limit_error", code="too_many_at_once", headers=headers)


def _metrics_only() -> ApiError:
    message = f"This key may read {METRICS} and nothing else. Send one of api_key, of admin_key, or of another tenant."
    return ApiError(403, message, code="permission_denied")
