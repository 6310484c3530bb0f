"""A simulation: the real controller, a virtual clock and simulated devices."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, Finish, Reject, UseCache, WakeAt
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import Cancelled, Event, ModelRemoved, ModelServed, Restored, Submitted, Woke
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table
from tilework.policy.traits import NeedsFuture
from tilework.sim.clock import Clock
from tilework.sim.cluster import Cluster
from tilework.sim.config import SimConfig
from tilework.sim.faults import FaultInjector
from tilework.sim.models.catalog import Change, SimCatalog, TimedChange
from tilework.sim.nodes.front_ends import FrontEnds
from tilework.sim.runs import State
from tilework.sim.timing import TableTimingModel
from tilework.sim.trace import Trace, TraceEnding

_MAX_CRASHES = 3  # Crashes of the controller in one simulation.
_NO_CHECKPOINT = Checkpoint()


class RequestLost(AssertionError):
    """A request has not ended although no event is left."""


Observe = Callable[[Event, tuple[Action, ...], int], None]


class Simulation:
    """One run of the controller on simulated devices. The same arguments give the same trace. Call `run` once."""

    def __init__(
        self,
        controller: ControllerConfig,
        table: CostTable,
        config: SimConfig,
        devices: CostTable | None = None,
        make_controller: Callable[[ControllerConfig, CostTable], Controller] = Controller,
    ) -> None:
        """Raises UnknownPolicy.

        Args:
            table: the controller's initial costs, which it corrects by what it observes.
            devices: the true costs on the simulated devices; the same by default.
            make_controller: makes the controller of each server, for callers that measure or replace parts of it.
        """
        self.controller = make_controller(controller, table)
        self._make_controller = make_controller
        self._table = table
        self.config = config
        self._injector = FaultInjector(config.faults, config.seed)
        self._has_faults = bool(config.faults)
        self._is_logged = "replay" in config.faults
        self._clock = Clock()
        devices = devices or table
        costs = TableCosts(devices)
        self._timing = TableTimingModel(
            costs,
            self._requests_of,
            config.dispatch_ns_at,
            config.switch_ns,
            self._injector,
            config.jitter,
            config.seed,
        )
        self.cluster = Cluster(
            self._clock,
            self._timing,
            costs,
            self._injector,
            self.controller,
            config,
            on_event=self._handle,
            on_image=self._keep_image,
            on_given_up=self._give_up,
        )
        self.catalog = SimCatalog(
            lambda: self.controller, self._handle, lambda: [self._requests[uid] for uid in self.open]
        )
        self._front_ends = FrontEnds(self._clock, self._injector, self._lose_client)
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, Request] = {}
        self._accepted: dict[str, Accept] = {}
        self._endings: dict[str, TraceEnding] = {}
        self._images: dict[str, State] = {}
        self._checkpoints: dict[str, Checkpoint] = {}  # By uid: requests whose job has not begun again.
        self._log = ReplayLog()
        self._num_crashes = 0
        self.num_servers = 1
        self._num_events = 0
        self._unserved: set[str] = set()  # Pipelines whose devices are all given up.
        self._observe: Observe | None = None

    @property
    def num_ended(self) -> int:
        """The number of requests that have ended."""
        return len(self._endings)

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """Number of times that each fault has happened."""
        return self._injector.counts

    def run(
        self,
        requests: Iterable[Request],
        cancels: Iterable[tuple[int, str]] = (),
        observe: Observe | None = None,
        limit_ns: int | None = None,
        changes: Iterable[TimedChange] = (),
    ) -> Trace:
        """Run until no event is left.

        Args:
            requests: each is submitted at its `arrival_ns`; ties are submitted in the order given.
            cancels: (time, uid) of clients that disconnect.
            observe: called after each event with the controller's answer, for checks and progress.
            changes: of what is served.

        Raises:
            RequestLost: a request has not ended.
            ReplayDiverged: a controller that was rebuilt from its log answers differently.
            TimeLimitExceeded: an event is due after `limit_ns`.
            ChangeMisjudged: a change was refused that can be made, or the reverse.
        """
        requests = list(requests)
        self._observe = observe
        for request in requests:
            assert request.uid not in self._requests, f"two requests have the uid {request.uid}"
            self._requests[request.uid] = self._dated(request)
        self._tell_future()
        self.cluster.start()
        for request in requests:
            self._clock.at(request.arrival_ns, partial(self._submit, request.uid))
        for at_ns, uid in cancels:
            self._clock.at(at_ns, partial(self._handle, Cancelled(uid, "the client went away")))
        for one in changes:
            self._clock.at(one.at_ns, partial(self._change, one.change))
        self._clock.run(limit_ns)
        lost = [request.uid for request in requests if request.uid not in self._endings]
        if lost:
            raise RequestLost(f"no event is left, and {', '.join(lost)} never ended")
        endings = tuple(self._endings[request.uid] for request in requests)
        runs, loads = tuple(self.cluster.runs), tuple(self.cluster.loads)
        num_reads = self.cluster.num_reads
        return Trace(runs=runs, endings=endings, num_events=self._num_events, loads=loads, num_reads=num_reads)

    def _tell_future(self) -> None:
        """Tell a policy that needs to know which requests will come."""
        if isinstance(policy := self.controller.policy, NeedsFuture):
            policy.foresee(tuple(self._requests.values()))

    def _dated(self, request: Request) -> Request:
        """Return the request with the times that its receiver gives it, whose clock may be off."""
        if not self._injector.injects("skew"):
            return request
        skew_ns = round((self._injector.fraction("skew") * 2 - 1) * self._injector.faults.size("skew") * NS_PER_S)
        deadline_ns = None if request.deadline_ns is None else request.deadline_ns + skew_ns
        return replace(request, arrival_ns=request.arrival_ns + skew_ns, deadline_ns=deadline_ns)

    def _submit(self, uid: str) -> None:
        if self._requests[uid].pipeline in self._unserved:
            self._end(uid, Status.REJECTED, "no device is left")
            return
        if refusal := self.catalog.refusal(self._requests[uid]):
            self._end(uid, Status.REJECTED, refusal)
            return
        self._timing.note_request(self._requests[uid])
        self._handle(Submitted(self._requests[uid]))
        self._front_ends.take(uid)

    def _change(self, change: Change) -> None:
        self.catalog.ask(change)
        self._go_on_with_changes()

    def _go_on_with_changes(self) -> None:
        if self.catalog.go_on():
            self._soon(self._go_on_with_changes)

    def _soon(self, call: Callable[[], None]) -> None:
        """Make a call after all that happens now, or when the controller is not paused any more."""
        self._clock.at(self._clock.now_ns, self._unless_restarted(call))

    def _lose_client(self, uid: str) -> None:
        if uid not in self._endings:
            self._handle(Cancelled(uid, "its front end was lost"))

    def _requests_of(self, job_ids: Sequence[int]) -> list[Request]:
        return [self._jobs[job_id] for job_id in job_ids]

    def _handle(self, event: Event) -> None:
        now_ns = self._clock.now_ns
        if self._clock.is_paused:
            self._clock.at(now_ns, self._unless_restarted(partial(self._handle, event)))  # Waits in its turn.
            return
        self._num_events += 1
        actions = self.controller.handle(event, now_ns)
        if self._is_logged:
            self._log.record(event, now_ns, actions)
        if isinstance(event, ModelServed | ModelRemoved):
            self.cluster.change_models(parse_table(json.loads(event.costs)) if isinstance(event, ModelServed) else None)
        for action in actions:
            self._perform(action)
        if self._observe is not None:
            self._observe(event, actions, now_ns)
        if self._has_faults and self._num_crashes < _MAX_CRASHES and self._may_crash_after(event):
            self._inject_crash()

    def _may_crash_after(self, event: Event) -> bool:
        """Crash perhaps, but not after `Restored`: a new server handles these events without an interruption."""
        return not isinstance(event, Restored) and not self._clock.is_paused

    # Actions.

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid):
                self._accepted[uid] = action
                self._requests[uid] = action.accepted(self._requests[uid])
                self._jobs[job_id] = self._requests[uid]
                self.cluster.begin(job_id, self._requests[uid], self._checkpoints.pop(uid, _NO_CHECKPOINT))
            case UseCache(job_id, uid):
                self._requests[uid] = self._jobs[job_id] = self._requests[uid].with_spare_cache
            case Reject(uid, reason):
                self._end(uid, Status.REJECTED, reason)
            case Finish(job_id, uid, status, reason):
                self._end(uid, status, reason)
                self.cluster.end(job_id)
            case WakeAt(at_ns):
                self._clock.at(at_ns, self._unless_restarted(partial(self._handle, Woke())))
            case _:
                self.cluster.perform(action)

    def _keep_image(self, job_id: int, image: State) -> None:
        self._images[self._jobs[job_id].uid] = image

    def _end(self, uid: str, status: Status, reason: str) -> None:
        assert uid not in self._endings, f"request {uid} ended twice"
        accepted = self._accepted.get(uid)
        self._endings[uid] = TraceEnding(
            request=self._requests[uid],
            status=status,
            finish_ns=self._clock.now_ns + (0 if status is Status.REJECTED else self.config.result_ns),
            job_id=None if accepted is None else accepted.job_id,
            eta_ns=None if accepted is None else accepted.eta_ns,
            reason=reason,
            image=self._images.pop(uid, None) if status is Status.DONE else None,
        )
        if self.catalog.is_waiting:
            self._soon(self._go_on_with_changes)

    @property
    def open(self) -> list[str]:
        """The requests that were accepted and have not ended, in order of acceptance."""
        return [uid for uid in self._accepted if uid not in self._endings]

    def _give_up(self, left: Collection[int]) -> None:
        pipelines = {request.pipeline for request in self._requests.values()}
        self._unserved = self.controller.costs.pools.unserved(pipelines, left)
        for uid in self.open:
            if self._requests[uid].pipeline in self._unserved:
                why = "every worker that a stage needs was lost, and none could be started again"
                self._handle(Cancelled(uid, why))

    # Crashes of the controller.

    def _inject_crash(self) -> None:
        for fault, recover in (("replay", self._replay), ("restart", self._restart)):
            if self._injector.injects(fault):
                self._num_crashes += 1
                self._clock.pause_until(self._clock.now_ns + round(self._injector.magnitude(fault) * NS_PER_S), recover)
                return

    def _replay(self) -> None:
        """Replace the controller by one that is rebuilt from the log. Devices have continued meanwhile."""
        self.controller = controller = self._make_controller(self.controller.config, self._table)
        self._tell_future()
        self._log.replay(controller)
        self.cluster.attach(controller)

    def _restart(self) -> None:
        """Start a new server, which restores the accepted requests. Devices and the controller begin anew."""
        self.num_servers += 1
        self._unserved = set()
        checkpoints = {self._jobs[job_id].uid: checkpoint for job_id, checkpoint in self.cluster.lose_all().items()}
        open_uids = self.open
        self._log.clear()
        self._table = self.controller.costs.table  # Keeps what was added.
        self.controller = self._make_controller(self.controller.config, self._table)
        self._tell_future()
        self.catalog.restart()
        self.cluster.restart(self.controller)
        for uid in open_uids:
            self._checkpoints[uid] = checkpoint = checkpoints.get(uid, _NO_CHECKPOINT)
            self._handle(Restored(self._requests[uid], checkpoint.position))
        self.cluster.start()

    def _unless_restarted(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that does nothing if the server has been restarted by then."""
        server = self.num_servers
        return lambda: call() if server == self.num_servers else None


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage between runs only: it takes an eighth of a run, and would be counted in single decisions."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ReplayDiverged(AssertionError):
    """A controller that was rebuilt from its log gives other answers than the first one."""


class ReplayLog:
    """Events with their times and the controller's answers, in memory."""

    def __init__(self) -> None:
        self._entries: list[tuple[Event, int, tuple[Action, ...]]] = []

    def record(self, event: Event, now_ns: int, actions: tuple[Action, ...]) -> None:
        self._entries.append((event, now_ns, actions))

    def clear(self) -> None:
        self._entries.clear()

    def replay(self, controller: Controller) -> None:
        """Let a new controller handle all events. Raises ReplayDiverged if it answers one differently."""
        for index, (event, at_ns, actions) in enumerate(self._entries):
            if controller.handle(event, at_ns) != actions:
                raise ReplayDiverged(f"event {index} of the log, {event!r}, is answered differently when replayed")
