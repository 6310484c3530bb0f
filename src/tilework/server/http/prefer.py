"""The `Prefer` header (RFC 7240), by which a client asks for an answer at once, and fetches the result later."""

from __future__ import annotations

from dataclasses import dataclass

RESPOND_ASYNC = "respond-async"
MAX_WAIT_S = 3600


@dataclass(frozen=True, slots=True)
class Preference:
    """The wish of a client. `is_async`: answer 202 if the result is not there within `wait_s` seconds."""

    is_async: bool = False
    wait_s: int = 0

    def applied(self) -> str:
        """Return the value of `Preference-Applied`."""
        return f"{RESPOND_ASYNC}, wait={self.wait_s}" if self.wait_s else RESPOND_ASYNC


def preference(headers: list[str]) -> Preference:
    """Read every `Prefer` header; unknown and malformed parts are ignored, as the RFC says."""
    is_async = False
    wait_s = 0
    for part in ",".join(headers).split(","):
        name, _, value = part.partition(";")[0].partition("=")
        name = name.strip().lower()
        value = value.strip().strip('"')
        is_async |= name == RESPOND_ASYNC
        if name == "wait" and value.isascii() and value.isdigit():
            wait_s = min(int(value[:9]), MAX_WAIT_S)
    return Preference(is_async, wait_s) if is_async else Preference()
