"""Idempotency keys: sending a call again joins the first one instead of drawing its images twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from tilework.server.bounded.long_text import LongText
from tilework.server.calls.errors import InvalidValue, KeyReused
from tilework.server.text import shown

NAME = "Idempotency-Key"
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant's key, and a digest (ASCII) of the body that it was first sent with."""

    tenant: str
    text: str
    fingerprint: bytes


def idempotency_key(text: str | None, tenant: str, route: str, body: Mapping[str, object]) -> Key | None:
    """Return the key that a client sent along with this body, or None.

    Raises:
        InvalidValue: it cannot be a key.
    """
    if text is None:
        return None
    if not 1 <= len(text) <= MAX_KEY_CHARS or not text.isascii() or not text.isprintable():
        message = (
            f"{NAME} = {shown(text)} is not accepted. Give 1 to {MAX_KEY_CHARS} printable ASCII characters,"
            " such as a UUID."
        )
        raise InvalidValue(message, field=NAME)
    canonical = json.dumps([route, body], sort_keys=True, default=_file_digest)
    return Key(tenant, text, hashlib.sha256(canonical.encode()).hexdigest().encode())


def _file_digest(content: object) -> str:
    """Return a digest that stands for a file of a form, or a long text, in the digest of a body."""
    if isinstance(content, LongText):
        return f"sha256-text:{content.digest()}"
    assert isinstance(content, bytes)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def reused(key: Key) -> KeyReused:
    message = f"{NAME} = {shown(key.text)} belongs to another body. Send the same body again, or another key."
    return KeyReused(message, field=NAME)
