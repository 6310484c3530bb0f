"""The client's record of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tilework.core.request import Shape
from tilework.formats.workload import WorkloadRequest


class CallEnd(StrEnum):
    """The end of a request, as the client saw it.

    DONE: with an image or a clip. REJECTED: with status 429. FAILED: with another error of the API. ERROR: without an
    answer, or with one that breaks the API.
    """

    DONE = "done"
    REJECTED = "rejected"
    FAILED = "failed"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request and its end, on the client's clock.

    `arrival_s` is when it was planned to be sent, counted from the start of the drive. `latency_s` counts from there to
    the end of the answer, whatever the answer, so a client that falls behind makes latencies longer, not shorter.
    `lag_s` of it is the client's own: from the planned arrival until it began to send. `timeline` is the server's
    `tilework` object, if it sends one. `file` is the encoded image or the video. `cause` says in a word or two why
    there is none ("http 503", "timeout", "connection", "answer"), `detail` in a sentence; both are empty for a request
    that is done. `num_hops` counts how often it was sent to another server, after a refusal that named one.
    """

    index: int
    request: WorkloadRequest
    arrival_s: float
    status: CallEnd
    latency_s: float
    lag_s: float = 0.0
    file: bytes | None = field(default=None, repr=False)
    timeline: Mapping[str, Any] | None = None
    cause: str = ""
    detail: str = ""
    num_hops: int = 0

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def slo_s(self) -> float | None:
        return self.request.slo_s

    @property
    def on_time(self) -> bool | None:
        """True if the file came within `slo_s` of the planned arrival; None without a deadline."""
        return None if self.slo_s is None else self.status is CallEnd.DONE and self.latency_s <= self.slo_s
