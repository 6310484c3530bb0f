"""Metrics for Prometheus: one registry per app, fed by the engine as things happen (docs/operations.md)."""

from __future__ import annotations

from prometheus_client import generate_latest

from tilework.core.component import LoadSource
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.core.work import NewPlacement, Work
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.metrics import families
from tilework.server.metrics.families import CallRefusal, WebhookResult, reason_of
from tilework.server.metrics.levels import Levels
from tilework.server.metrics.meters import Meters, Names
from tilework.server.metrics.requests import RequestMetrics
from tilework.server.metrics.works import WorkMetrics
from tilework.server.schema.answers import Unready
from tilework.sets.window import UseWindow


class Metrics(Observer):
    """Observes the engine. No metric is counted by tenant.

    `use` is the recent use of devices, for other sets (see `server.sets`).
    """

    def __init__(self, use: UseWindow) -> None:
        meters = Meters()
        sizes = Names()
        self._use = use
        self._registry = meters.registry
        self._requests = RequestMetrics(meters, sizes)
        self._works = WorkMetrics(meters, sizes)
        self._invalid = meters.counter(families.INVALID_CALLS)
        self._warnings = meters.counter(families.WARNINGS)
        self._webhooks = meters.counter(families.WEBHOOK_ATTEMPTS)
        self._at_front_ends = meters.counter(families.FRONTEND_REFUSALS)
        self._stops = meters.counter(families.WORK_STOPS)
        self._stuck = meters.counter(families.STUCK_WORKS)
        self._log_losses = meters.counter(families.LOG_LOSSES)
        self._moves = meters.counter(families.MOVES)
        self._loads = meters.counter(families.WEIGHT_LOADS)
        self._load_s = meters.counter(families.WEIGHT_LOAD_SECONDS)
        self._load_bytes = meters.counter(families.WEIGHT_LOAD_BYTES)
        self._placements = meters.counter(families.PLACEMENT_CHANGES)
        self._preemptions = meters.counter(families.PREEMPTIONS)
        self._previews = meters.counter(families.PREVIEWS)
        self._decision = meters.histogram(families.DECISION_SECONDS)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def register(self, levels: Levels) -> None:
        """Show these levels, too."""
        self._registry.register(levels)

    # For the server.

    def count_invalid(self) -> None:
        self._invalid.inc()

    def count_warnings(self, number: int) -> None:
        """Count the warnings that a call gets."""
        self._warnings.inc(number)

    def count_webhook(self, is_taken: bool) -> None:
        """Count an attempt to send a webhook."""
        self._webhooks.labels(WebhookResult.TAKEN if is_taken else WebhookResult.FAILED).inc()

    def count_refused_at_front_ends(self, number: int) -> None:
        """Count calls that front ends have refused, since the queue is full."""
        self._at_front_ends.inc(number)

    def count_too_many_open(self, priority: str) -> None:
        """Count a call that a tenant's limit has refused."""
        self._requests.refused(priority, CallRefusal.TOO_MANY_OPEN)

    def count_too_many_a_minute(self) -> None:
        """Count a call of a key that has made its calls of this minute."""
        self._requests.refused_unread(CallRefusal.TOO_MANY_A_MINUTE)

    def count_input_full(self, priority: str) -> None:
        """Count a call whose pictures found no memory."""
        self._requests.refused(priority, CallRefusal.INPUT_FULL)

    def count_unkept(self, priority: str) -> None:
        """Count a call whose results found no place."""
        self._requests.refused(priority, CallRefusal.RESULTS_FULL)

    def count_unready(self, priority: str, num_images: int, unready: Unready) -> None:
        """Count a call of this number of images that has come while none is taken."""
        for _ in range(num_images):
            self._requests.refused(priority, reason_of(unready))

    # For the engine.

    def on_decided(self, now_ns: int, took_ns: int, num_waiting: int) -> None:
        self._decision.observe(s_from_ns(took_ns))
        self._works.decided(now_ns, num_waiting)

    def on_refused(self, request: Request, code: RefusalCode) -> None:
        self._requests.refused(request.priority, code)

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        self._requests.ended(ticket, outcome)

    def on_work_ended(self, ended: EndedWork) -> None:
        self._works.ended(ended)
        self._use.ran(ended.work.stage.name, ended.work.devices, ended.start_ns, ended.end_ns)

    def on_work_stopped(self, work_id: int) -> None:
        self._stops.inc()

    def on_stuck(self, work: Work) -> None:
        self._stuck.inc()

    def on_log_lost(self) -> None:
        self._log_losses.inc()

    def on_weights_loaded(self, device_id: int, source: LoadSource, num_bytes: int, run_ns: int) -> None:
        self._loads.labels(source).inc()
        self._load_s.labels(source).inc(s_from_ns(run_ns))
        self._load_bytes.labels(source).inc(num_bytes)

    def on_placed(self, placement: NewPlacement) -> None:
        self._placements.inc()

    def on_moved(self, job_id: int) -> None:
        self._moves.inc()

    def on_preempted(self, job_id: int) -> None:
        self._preemptions.inc()

    def on_previewed(self, job_id: int) -> None:
        self._previews.inc()

    def on_joined(self, device_id: int, now_ns: int) -> None:
        self._works.joined(device_id, now_ns)
        self._use.joined(device_id, now_ns)

    def on_lost(self, device_id: int) -> None:
        self._works.lost(device_id)
        self._use.lost(device_id)
