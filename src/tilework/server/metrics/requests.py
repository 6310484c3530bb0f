"""Metrics of requests: their ends, against their deadlines, and against their predictions."""

from __future__ import annotations

from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import Request, Status
from tilework.core.time import s_from_ns
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.metrics import families
from tilework.server.metrics.families import DeadlineResult, PatchResult, PromiseResult
from tilework.server.metrics.meters import Meters, Names
from tilework.server.schema.answers import Unready


class RequestMetrics:
    """Counts each image once, when it ends or is refused.

    `Request.met_deadline` decides whether a deadline or a promise was kept; a cancelled one counts neither way.
    """

    def __init__(self, meters: Meters, sizes: Names) -> None:
        self._sizes = sizes
        self._classes = Names(tuple(DEFAULT_CLASSES))
        self._requests = meters.counter(families.REQUESTS)
        self._refusals = meters.counter(families.REFUSALS)
        self._deadlines = meters.counter(families.DEADLINES)
        self._promises = meters.counter(families.PROMISES)
        self._latency = meters.histogram(families.REQUEST_LATENCY_SECONDS)
        self._queue = meters.histogram(families.REQUEST_QUEUE_SECONDS)
        self._slack = meters.histogram(families.SLACK_SECONDS)
        self._device = meters.histogram(families.REQUEST_DEVICE_SECONDS)
        self._eta_error = meters.histogram(families.ETA_ERROR_SECONDS)
        self._eta_ratio = meters.histogram(families.ETA_ERROR_RATIO)
        self._cached = meters.counter(families.CACHED_PATCHES)
        for name in DEFAULT_CLASSES:  # Series that are known from the start begin at 0.
            for outcome in (status for status in Status if status.is_final):
                self._requests.labels(name, outcome)
            for family in (self._latency, self._queue):
                family.labels(name)

    def refused(self, priority: str, reason: str) -> None:
        self._requests.labels(self._classes.of(priority), Status.REJECTED).inc()
        self._refusals.labels(reason).inc()

    def refused_unread(self, reason: str) -> None:
        """Count the refusal of a call whose class is not known, since its body was not read."""
        self._refusals.labels(reason).inc()

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        request = ticket.request
        if ticket.taken_back:
            self.refused(request.priority, Unready.DISK_UNWRITABLE)
            return
        self._requests.labels(self._classes.of(request.priority), outcome.status).inc()
        if (is_met := request.met_deadline(outcome.status, outcome.finished_ns)) is not None:
            self._count_deadline(request, is_met)
        if outcome.status is Status.DONE:
            self._measure(ticket, outcome)

    def _count_deadline(self, request: Request, is_met: bool) -> None:
        name = self._classes.of(request.priority)
        size = self._sizes.of(request.shape)
        self._deadlines.labels(name, DeadlineResult.ON_TIME if is_met else DeadlineResult.LATE, size).inc()
        if request.is_promise:
            self._promises.labels(PromiseResult.KEPT if is_met else PromiseResult.BROKEN).inc()

    def _measure(self, ticket: Ticket, outcome: Outcome) -> None:
        request = ticket.request
        latency_ns = outcome.finished_ns - ticket.request.arrival_ns
        name = self._classes.of(request.priority)
        size = self._sizes.of(request.shape)
        error_ns = outcome.finished_ns - ticket.eta_ns
        self._latency.labels(name).observe(s_from_ns(latency_ns))
        self._queue.labels(name).observe(s_from_ns(ticket.queue_ns or 0))
        device_ns = sum((one.end_ns - one.start_ns) * len(one.devices) // one.batch for one in outcome.segments)
        self._device.labels(size).observe(s_from_ns(device_ns))
        if request.deadline_ns is not None:
            self._slack.labels(name, size).observe(s_from_ns(request.deadline_ns - outcome.finished_ns))
        self._eta_error.observe(s_from_ns(error_ns))
        for use in (one.cache_use for one in outcome.segments if one.cache_use is not None):
            self._cached.labels(PatchResult.COMPUTED).inc(use.computed)
            self._cached.labels(PatchResult.SKIPPED).inc(use.skipped)
        self._eta_ratio.observe(abs(error_ns) / max(1, latency_ns))
