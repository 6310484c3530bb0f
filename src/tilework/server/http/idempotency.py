"""The `Idempotency-Key` header: sending a call again joins the first one instead of drawing its pictures twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from tilework.server.http.errors import ApiError, shown

MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant's key, and what it was used for first: the digest in ASCII."""

    tenant: str
    text: str
    fingerprint: bytes


def idempotency_key(header: str | None, tenant: str, route: str, body: Mapping[str, object]) -> Key | None:
    """The key that a client sent along with this body, or None.

    Raises:
        ApiError: 400 if it is no key.
    """
    if header is None:
        return None
    if not 1 <= len(header) <= MAX_KEY_CHARS or not header.isascii() or not header.isprintable():
        message = (
            f"Idempotency-Key = {shown(header)} is not accepted. Give 1 to {MAX_KEY_CHARS} printable ASCII characters,"
            " such as a UUID."
        )
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_value")
    canonical = json.dumps([route, body], sort_keys=True)
    return Key(tenant, header, hashlib.sha256(canonical.encode()).hexdigest().encode())


def reused(key: Key) -> ApiError:
    message = f"Idempotency-Key = {shown(key.text)} belongs to another body. Send the same body again, or another key."
    return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
