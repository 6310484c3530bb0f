"""What became of requests: how they ended, against their deadlines, and against their predictions."""

from __future__ import annotations

from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.time import s_from_ns
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.metrics.meters import DEVICE_S, ERROR_S, ERROR_SHARE, LATENCY_S, SLACK_S, Meters, Names

TOO_MANY_OPEN = "too_many_open"
INPUT_FULL = "input_full"
TOO_MANY_A_MINUTE = "rate_limit_exceeded"
_OUTCOMES = (Status.DONE, Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.REJECTED)


class RequestMetrics:
    """Counts each image once, when it ends or is refused.

    Whether a deadline or a promise was kept, `Request.met_deadline` says; one that was given up counts neither way.
    """

    def __init__(self, meters: Meters, sizes: Names) -> None:
        self._sizes = sizes
        self._classes = Names(tuple(DEFAULT_CLASSES))
        self._requests = meters.counter("requests", "Images by how they ended", "class", "outcome")
        self._refusals = meters.counter("refusals", "Images that were not taken, by the reason", "reason")
        self._deadlines = meters.counter(
            "deadlines", "Images with a deadline by whether they were done by it", "class", "result", "size"
        )
        self._promises = meters.counter("promises", "Promised deadlines by whether they were kept", "result")
        self._latency = meters.histogram(
            "request_latency_seconds", "Arrival to last pixel of images that are done", LATENCY_S, "class"
        )
        self._queue = meters.histogram(
            "request_queue_seconds", "Arrival to first work of images that are done", LATENCY_S, "class"
        )
        self._slack = meters.histogram(
            "slack_seconds", "Deadline minus end of images that are done", SLACK_S, "class", "size"
        )
        self._device = meters.histogram(
            "request_device_seconds", "Device time of images that are done", DEVICE_S, "size"
        )
        self._eta_error = meters.histogram(
            "eta_error_seconds", "End minus the end that was predicted at admission", ERROR_S
        )
        self._eta_ratio = meters.histogram(
            "eta_error_ratio", "Distance of the end from what was predicted, by latency", ERROR_SHARE
        )
        self._cached = meters.counter(
            "cached_patches", "Patches of blocks of steps of images with a cache that are done", "result"
        )
        self._register()

    def _register(self) -> None:
        """Show what is known from the start as 0."""
        for name in DEFAULT_CLASSES:
            for outcome in _OUTCOMES:
                self._requests.labels(name, outcome)
            for family in (self._latency, self._queue):
                family.labels(name)
        for reason in (*RefusalCode, TOO_MANY_OPEN, INPUT_FULL, TOO_MANY_A_MINUTE):
            self._refusals.labels(reason)
        for result in ("kept", "broken"):
            self._promises.labels(result)
        for result in ("computed", "skipped"):
            self._cached.labels(result)

    def refused(self, priority: str, reason: str) -> None:
        self._requests.labels(self._classes.of(priority), Status.REJECTED).inc()
        self._refusals.labels(reason).inc()

    def refused_unread(self, reason: str) -> None:
        """Of a call whose class is not known, since its body was not read."""
        self._refusals.labels(reason).inc()

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        request = ticket.request
        self._requests.labels(self._classes.of(request.priority), outcome.status).inc()
        if (is_met := request.met_deadline(outcome.status, outcome.finished_ns)) is not None:
            self._count_deadline(request, is_met)
        if outcome.status is Status.DONE:
            self._measure(ticket, outcome)

    def _count_deadline(self, request: Request, is_met: bool) -> None:
        name, size = self._classes.of(request.priority), self._sizes.of(request.shape)
        self._deadlines.labels(name, "on_time" if is_met else "late", size).inc()
        if request.is_promise:
            self._promises.labels("kept" if is_met else "broken").inc()

    def _measure(self, ticket: Ticket, outcome: Outcome) -> None:
        request, latency_ns = ticket.request, outcome.finished_ns - ticket.request.arrival_ns
        name, size = self._classes.of(request.priority), self._sizes.of(request.shape)
        error_ns = outcome.finished_ns - ticket.eta_ns
        self._latency.labels(name).observe(s_from_ns(latency_ns))
        self._queue.labels(name).observe(s_from_ns(ticket.queue_ns or 0))
        device_ns = sum((one.end_ns - one.start_ns) * len(one.devices) // one.batch for one in outcome.segments)
        self._device.labels(size).observe(s_from_ns(device_ns))
        if request.deadline_ns is not None:
            self._slack.labels(name, size).observe(s_from_ns(request.deadline_ns - outcome.finished_ns))
        self._eta_error.observe(s_from_ns(error_ns))
        for use in (one.cache_use for one in outcome.segments if one.cache_use is not None):
            self._cached.labels("computed").inc(use.computed)
            self._cached.labels("skipped").inc(use.skipped)
        self._eta_ratio.observe(abs(error_ns) / max(1, latency_ns))
