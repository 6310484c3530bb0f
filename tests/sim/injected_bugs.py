"""Bugs for a test to put into the controller, or into what knows of nodes: the invariants must notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stages import DIFFUSE, stage_of
from tilework.control.cluster.job import Job
from tilework.control.cluster.residents import Residents
from tilework.control.cluster.tracker import Tracker
from tilework.control.components import Components
from tilework.control.controller import Controller
from tilework.control.nodes.blob_places import BlobPlaces
from tilework.control.nodes.blobs import NodeBlobs
from tilework.control.nodes.clock import ClockOffset
from tilework.control.nodes.places import NodePlaces
from tilework.control.recovery import Recovery
from tilework.core.actions import Action
from tilework.core.component import Memory
from tilework.core.events import Cancelled, DeviceJoined, Event
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.request import Request, Status
from tilework.core.work import Work
from tilework.cost.table_costs import TableCosts
from tilework.cost.weights import TableWeights
from tilework.policy.toolkit.order import DeadlineOrder
from tilework.sim.workers import Workers


def lose_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted job is parked, and stays so."""

    def restart(self: Tracker, job: Job, position: int | None) -> None:
        real(self, job, position)
        self.park(job)

    real = Tracker.restart
    monkeypatch.setattr(Tracker, "restart", restart)
    monkeypatch.setattr(Tracker, "unpark", lambda self: None)


def fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Recovery.retry

    def retry(self: Recovery, job: Job, reason: str, **options: Any) -> list[Action]:
        job.failures = self._max_attempts
        return real(self, job, reason, **options)

    monkeypatch.setattr(Recovery, "retry", retry)


def forget_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart a job counts one step too many as done."""
    real = Job.restart

    def restart(self: Job, position: int | None) -> None:
        if position is None and self.done.num_steps_left > 1 and self.done.stage and self.done.stage.name == "diffuse":
            self.done = self.done.advanced(1)
        real(self, position)

    monkeypatch.setattr(Job, "restart", restart)


def take_early_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "awaited", lambda self, work: None)


def end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Recovery.end

    def end(self: Recovery, job: Job, status: Status, reason: str) -> list[Action]:
        actions = real(self, job, status, reason)
        return [*actions, actions[-1]]

    monkeypatch.setattr(Recovery, "end", end)


def keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residents, "beyond", lambda self, device_id, most: [])


def go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt has the number of the first."""
    real = Job.restart

    def restart(self: Job, position: int | None) -> None:
        real(self, position)
        self.attempt = 1

    monkeypatch.setattr(Job, "restart", restart)


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a deadline is served last."""
    real = DeadlineOrder.urgency_ns

    def urgency_ns(self: DeadlineOrder, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return 1 << 60 if request.deadline_ns is None else real(self, request, dropped_to_best_effort, delay_ns)

    monkeypatch.setattr(DeadlineOrder, "urgency_ns", urgency_ns)
    monkeypatch.setattr("tilework.sim.invariants.Invariants._accept", _with_true_urgency(real))


def _with_true_urgency(real: Callable[..., int]) -> Callable[..., None]:
    """The bound is that of the true order."""
    from tilework.sim.invariants import Invariants

    accept = Invariants._accept

    def patched(self: Invariants, job_id: int, uid: str, eta_ns: int, event: Event, now_ns: int) -> None:
        accept(self, job_id, uid, eta_ns, event, now_ns)
        self._urgency_ns[uid] = real(DeadlineOrder(), self._requests[uid], False)

    return patched


def forget_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableCosts, "needs_slices", lambda self, stage, shape: False)


def send_too_many_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard starts promised work on devices that have enough works already."""
    monkeypatch.setattr("tilework.admission.reservation_guard.WORKS_PER_DEVICE", 1000)


def share_exact_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "may_share", True)
    monkeypatch.setattr("tilework.control.cluster.tracker.check_start", lambda *_: None)


def widen_exact_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "tilework.cost.demand.step_degrees"
    monkeypatch.setattr(step, lambda request, costs: costs.degrees(stage_of(request.pipeline, DIFFUSE)))
    monkeypatch.setattr("tilework.control.cluster.tracker.check_start", lambda *_: None)


def show_policies_the_stages_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "leg", property(lambda cursor: cursor))
    monkeypatch.setattr("tilework.control.cluster.tracker.check_start", lambda *_: None)


def share_among_loras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are equal if their names are."""
    monkeypatch.setattr(Stage, "__eq__", lambda stage, other: stage is not None and stage.name == other.name)
    monkeypatch.setattr(Stage, "__hash__", lambda stage: hash(stage.name))


def mix_sizes_with_loras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tilework.core.graph.graph._with_loras",
        lambda stage, loras: replace(
            stage, loras=tuple(one for one, changes in loras.items() if changes & set(stage.spec.components))
        ),
    )


def load_no_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TableWeights.components
    monkeypatch.setattr(TableWeights, "components", lambda self, stage: real(self, replace(stage, loras=())))


def load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Components, "_load", lambda self, *load: [])


def drop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Memory.used
    monkeypatch.setattr(Memory, "used", lambda self, *use: real(self, *use)._replace(drops=()))


def call_loads_ahead(value: bool) -> Callable[[pytest.MonkeyPatch], None]:
    def breakage(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Components._load
        monkeypatch.setattr(
            Components, "_load", lambda self, *load: [replace(one, is_ahead=value) for one in real(self, *load)]
        )

    return breakage


def answer_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision depends on something that is not in the log."""
    real, count = Tracker.commit, iter(range(10**9))

    def commit(self: Tracker, *arguments: object) -> Work:
        return replace(real(self, *arguments), why=str(next(count)))  # type: ignore[arg-type]

    monkeypatch.setattr(Tracker, "commit", commit)


def count_messages_of_lost_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodePlaces, "is_current", lambda self, place, session: True)


def obey_old_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs what was sent to the one before it."""
    monkeypatch.setattr(
        Workers,
        "unless_dead",
        lambda self, device_id, call: lambda: call() if self._fleet.is_up(device_id) else None,
    )


def convert_times_by_the_longest_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClockOffset, "offset_ns", property(lambda self: max(self._samples)[1]))


def believe_that_all_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlobPlaces, "not_fetched", BlobPlaces.fetched)


def fetch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlobPlaces, "lacking", lambda self, blobs, node: {})


def keep_what_is_fetched_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlobPlaces.fetched
    monkeypatch.setattr(BlobPlaces, "fetched", lambda self, blob, node: real(self, blob, node) or True)


def forget_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob is discarded on the first node that has it, alone."""
    real = BlobPlaces.discard
    monkeypatch.setattr(BlobPlaces, "discard", lambda self, blob: set(sorted(real(self, blob))[:1]))


def measure_failed_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that took too long counts as one that took so long."""
    real = NodeBlobs.fetched
    monkeypatch.setattr(NodeBlobs, "fetched", lambda self, answer, node: real(self, replace(answer, reason=""), node))


def ignore_late_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller.handle

    def handle(self: Controller, event: Event, now_ns: int) -> tuple[Action, ...]:
        is_late = isinstance(event, DeviceJoined) and event.node > 0 and now_ns > 0
        return () if is_late else real(self, event, now_ns)

    monkeypatch.setattr(Controller, "handle", handle)


def go_on_after_the_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller.handle

    def handle(self: Controller, event: Event, now_ns: int) -> tuple[Action, ...]:
        return () if isinstance(event, Cancelled) else real(self, event, now_ns)

    monkeypatch.setattr(Controller, "handle", handle)


def promise_on_silent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new promise counts on devices whose nodes say nothing."""
    monkeypatch.setattr(Tracker, "silent", frozenset())
