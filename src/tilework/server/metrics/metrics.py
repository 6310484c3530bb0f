"""What Prometheus reads: one registry per app, fed by the engine as things happen; `docs/operations.md` lists all."""

from __future__ import annotations

from prometheus_client import generate_latest

from tilework.core.component import LoadSource
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.core.work import NewPlacement, Work
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.engine_protocol import Engine
from tilework.server.metrics.levels import Levels
from tilework.server.metrics.meters import DECISION_S, Meters, Names
from tilework.server.metrics.requests import INPUT_FULL, TOO_MANY_A_MINUTE, TOO_MANY_OPEN, RequestMetrics
from tilework.server.metrics.works import WorkMetrics
from tilework.sets.window import UseWindow
from tilework.store.results import ResultStore


class Metrics(Observer):
    """Observes the engine, once `Engine.observe` has it. No metric is counted by tenant.

    `use` is how busy devices were lately, for other sets (see `server.sets`).
    """

    def __init__(self, engine: Engine, store: ResultStore, use: UseWindow) -> None:
        meters, sizes = Meters(), Names()
        self._use = use
        self._registry = meters.registry
        self._registry.register(Levels(engine, store))
        self._requests = RequestMetrics(meters, sizes)
        self._works = WorkMetrics(meters, sizes)
        self._invalid = meters.counter("invalid_calls", "Calls with a mistake, refused before they became images")
        self._warnings = meters.counter("warnings", "Warnings in answers, that fields of calls were ignored")
        self._webhooks = meters.counter("webhook_attempts", "Attempts to tell webhooks of the ends of calls", "result")
        for result in ("taken", "failed"):
            self._webhooks.labels(result)
        self._at_front_ends = meters.counter(
            "frontend_refusals", "Calls that front ends refused by themselves, since the queue is full"
        )
        self._stops = meters.counter("work_stops", "Works that were asked to end early")
        self._stuck = meters.counter("stuck_works", "Works that did no step for too long")
        self._log_losses = meters.counter("log_losses", "Event logs that could not be written to their end")
        self._moves = meters.counter("moves", "Images that went on on devices that did not have their state")
        self._loads = meters.counter("weight_loads", "Loads of weights onto a device", "source")
        self._load_s = meters.counter("weight_load_seconds", "Time of devices for loads of weights", "source")
        self._load_bytes = meters.counter("weight_load_bytes", "Weights that devices have loaded", "source")
        self._placements = meters.counter("placement_changes", "Times that the policy changed what devices are for")
        self._preemptions = meters.counter("preemptions", "Unfinished images that had to wait for others")
        self._previews = meters.counter("previews", "Previews that were drawn")
        self._decision = meters.histogram("decision_seconds", "Time of the controller for an event", DECISION_S)

    def text(self) -> bytes:
        """In Prometheus' format. The engine must have started."""
        return generate_latest(self._registry)

    # For the server.

    def count_invalid(self) -> None:
        self._invalid.inc()

    def count_warnings(self, number: int) -> None:
        """A call gets this number of warnings."""
        self._warnings.inc(number)

    def count_webhook(self, is_taken: bool) -> None:
        """An attempt to send a webhook has ended."""
        self._webhooks.labels("taken" if is_taken else "failed").inc()

    def count_refused_at_front_ends(self, number: int) -> None:
        """Front ends have refused this number of calls, since the queue is full."""
        self._at_front_ends.inc(number)

    def count_too_many_open(self, priority: str) -> None:
        """A tenant's limit has refused a call."""
        self._requests.refused(priority, TOO_MANY_OPEN)

    def count_too_many_a_minute(self) -> None:
        """A key has made its calls of this minute."""
        self._requests.refused_unread(TOO_MANY_A_MINUTE)

    def count_input_full(self, priority: str) -> None:
        """There was no memory for the pictures that a call gives."""
        self._requests.refused(priority, INPUT_FULL)

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
