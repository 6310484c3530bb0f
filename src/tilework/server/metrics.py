"""What Prometheus reads: one registry per app, names with units, counted once per image when its story ends."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tilework.core.request import Status
from tilework.core.time import s_from_ns
from tilework.core.work import DIFFUSE
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.engine_protocol import Engine
from tilework.store.results import ResultStore

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120, 300, 600)


class Metrics:
    """Counters that the server moves, and gauges that ask engine and store when they are read.

    `tilework_requests_total` counts images by how they ended, and calls that were refused before they became any as
    "invalid". An image with a deadline that was not done in time, for whatever reason, is counted as late.
    """

    def __init__(self, engine: Engine, store: ResultStore) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Images by how they ended", "outcome")
        for outcome in ("done", "failed", "cancelled", "rejected", "invalid"):
            self._requests.labels(outcome)
        self._deadlines = self._counter("deadlines", "Images with a deadline by whether they met it", "result")
        for result in ("on_time", "late"):
            self._deadlines.labels(result)
        self._steps = self._counter("steps", "Denoising steps of images that ended")
        self._device = self._counter("device_seconds", "Device time of images that ended", "stage")
        self._latency = self._histogram("request_latency_seconds", "Arrival to last pixel of images that are done")
        self._queue = self._histogram("request_queue_seconds", "Arrival to first work of images that are done")
        self._engine_gauges(engine)
        self._gauge("store_bytes", "Bytes of results kept for fetching").set_function(lambda: store.num_bytes)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def follow(self, ticket: Ticket) -> None:
        """Count the ticket's image when it ends. This also retrieves an outcome that nobody waits for any more."""
        ticket.outcome.add_done_callback(lambda outcome: self._count(ticket, outcome))

    def count_invalid(self) -> None:
        self._requests.labels("invalid").inc()

    def count_rejected(self) -> None:
        self._requests.labels(Status.REJECTED).inc()

    def _count(self, ticket: Ticket, future: asyncio.Future[Outcome]) -> None:
        outcome = None if future.cancelled() or future.exception() is not None else future.result()
        self._requests.labels(Status.FAILED if outcome is None else outcome.status).inc()
        self._count_deadline(ticket, outcome)
        if outcome is None:
            return
        for segment in outcome.segments:
            self._device.labels(segment.stage).inc(s_from_ns(segment.end_ns - segment.start_ns) * len(segment.gpus))
        self._steps.inc(sum(segment.num_steps for segment in outcome.segments if segment.stage == DIFFUSE))
        if outcome.status is Status.DONE:
            self._latency.observe(s_from_ns(outcome.finished_ns - ticket.request.arrival_ns))
            self._queue.observe(s_from_ns(ticket.queue_ns or 0))

    def _count_deadline(self, ticket: Ticket, outcome: Outcome | None) -> None:
        """A client that cancels has given its deadline up, so that neither result would be true."""
        deadline_ns = ticket.request.deadline_ns
        if deadline_ns is None or (outcome is not None and outcome.status is Status.CANCELLED):
            return
        met = outcome is not None and outcome.status is Status.DONE and outcome.finished_ns <= deadline_ns
        self._deadlines.labels("on_time" if met else "late").inc()

    def _engine_gauges(self, engine: Engine) -> None:
        running = self._gauge("jobs_running", "Images that a device is working on")
        running.set_function(lambda: engine.health().num_running)
        queued = self._gauge("jobs_queued", "Accepted images that wait for a device")
        queued.set_function(lambda: engine.health().num_jobs - engine.health().num_running)
        up = self._gauge("devices_up", "Devices that take work")
        up.set_function(lambda: engine.health().num_devices_up)
        self._gauge("devices", "Devices that were asked for").set_function(lambda: engine.health().num_devices)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tilework_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tilework_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"tilework_{name}", text, buckets=_BUCKETS_S, registry=self.registry)
