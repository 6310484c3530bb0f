"""The notice of a webhook, and the signature by which its receiver knows the sender.

Form and signature are those of Standard Webhooks 1.0 (https://www.standardwebhooks.com), which the libraries of OpenAI
check.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

_BASE64 = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice that a call has ended, for the URL that the call named. All attempts to send it have the same `id`."""

    call_uid: str
    url: str
    body: bytes = field(repr=False)

    @property
    def id(self) -> str:
        return f"evt_{self.call_uid}"

    def headers(self, secret: str, unix_s: int) -> Mapping[str, str]:
        """Return the headers of an attempt at this time."""
        return {
            "Content-Type": "application/json",
            "webhook-id": self.id,
            "webhook-timestamp": str(unix_s),
            "webhook-signature": f"v1,{_signature(secret, self.id, unix_s, self.body)}",
        }


def notice(call_uid: str, url: str, status: str, ended_s: int, call: Mapping[str, object]) -> Notice:
    """Make the notice of a call that is done, failed or cancelled; `call` is its status in `GET /v1/requests/{uid}`."""
    event = {
        "id": f"evt_{call_uid}",
        "object": "event",
        "type": f"tilework.request.{status}",
        "created_at": ended_s,
        "data": call,
    }
    return Notice(call_uid=call_uid, url=url, body=json.dumps(event).encode("ascii"))


def secret_bytes(secret: str) -> bytes:
    """Return the key that a secret encodes: base64 after `whsec_`, or else its own text. Raises ValueError."""
    return (
        base64.b64decode(secret.removeprefix(_BASE64), validate=True) if secret.startswith(_BASE64) else secret.encode()
    )


def _signature(secret: str, notice_id: str, unix_s: int, body: bytes) -> str:
    content = b".".join((notice_id.encode(), str(unix_s).encode(), body))
    return base64.b64encode(hmac.new(secret_bytes(secret), content, hashlib.sha256).digest()).decode("ascii")
