"""What the body of a route asks for, in the terms of a call for images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilework.server.calls.parsing.video_format import AskedVideo


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of an image. Chats have a deadline in a field of their own, and videos a format."""

    fields: Mapping[str, object]
    slo_ms: float | None = None
    video: AskedVideo | None = None
