"""The simulated driver: a virtual clock, modelled devices and the real controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, Finish, Reject, WakeAt
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import Cancelled, Event, Restored, Submitted, Woke
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import StageId
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.clock import Clock
from tilework.sim.cluster import Cluster
from tilework.sim.faults import Dice, Faults
from tilework.sim.runs import Run, State
from tilework.sim.works import SimulatedWorks

_MOST_RESTARTS = 3  # Of the controller in one simulation.
_NOTHING = Checkpoint()


class Forgotten(AssertionError):
    """A request has no end."""


class Unfaithful(AssertionError):
    """A controller that was built again from its log does not do what the first one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """What the modelled devices are like.

    `jitter` is the relative standard deviation of each work's duration (0: exactly its table time). `dispatch_ns` lies
    before every work and is not part of its run: what live devices lose between two works, one number or by degree
    (a degree that is not listed loses what the nearest narrower one does, or the narrowest). `switch_ns` comes on top
    where steps do not go on from where their devices are: the last steps that these ran were of another job, or of this
    one on another group. `result_ns` lies between
    the end of a request's last work and the client's answer. `faults` are what goes wrong.
    """

    num_devices: int
    seed: int = 0
    jitter: float = 0.0
    dispatch_ns: int | Mapping[int, int] = 0
    switch_ns: int = 0
    result_ns: int = 0
    faults: Faults = field(default_factory=Faults)

    def dispatch_ns_at(self, degree: int) -> int:
        """What a work on so many devices loses before it runs."""
        if isinstance(self.dispatch_ns, int):
            return self.dispatch_ns
        known = self.dispatch_ns.keys()
        nearest = max((one for one in known if one <= degree), default=min(known, default=None))
        return 0 if nearest is None else self.dispatch_ns[nearest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one request ended.

    `job_id` and `eta_ns`, what admission predicted, are None if it was rejected. `image` is what the delivered picture
    was made of.
    """

    request: Request
    status: Status
    finish_ns: int
    job_id: int | None
    eta_ns: int | None
    reason: str
    image: State | None = None

    @property
    def on_time(self) -> bool:
        """Whether it was done by its deadline; without one, whether it was done."""
        deadline_ns = self.request.deadline_ns
        return self.status is Status.DONE and (deadline_ns is None or self.finish_ns <= deadline_ns)

    @property
    def latency_ns(self) -> int:
        return self.finish_ns - self.request.arrival_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a simulation did: executed works in order of their ends, endings in order of the requests given."""

    runs: tuple[Run, ...]
    endings: tuple[Ending, ...]
    num_events: int


Observe = Callable[[Event, tuple[Action, ...], int], None]


class Simulation:
    """One run of the controller on modelled devices. Same arguments, same trace. `run` may be called once."""

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
            table: what the controller believes at first; its costs drift with what it observes.
            devices: what work truly costs on the simulated devices; the same by default.
            make_controller: makes each server's controller, for callers that measure or replace parts of it.
        """
        self.controller = make_controller(controller, table)
        self._make_controller = make_controller
        self._table = table
        self.config = config
        self._dice = Dice(config.faults, config.seed)
        self._has_faults, self._is_logged = bool(config.faults), "replay" in config.faults
        self._clock = Clock()
        devices = devices or table
        costs = TableCosts(devices)
        self._works = SimulatedWorks(
            costs,
            self._requests_of,
            config.dispatch_ns_at,
            config.switch_ns,
            self._dice,
            config.jitter,
            config.seed,
        )
        self.cluster = Cluster(
            self._clock,
            self._works,
            costs,
            self._dice,
            self.controller,
            num_devices=config.num_devices,
            devices_per_node=devices.devices_per_node,
            stages=frozenset(StageId(row.pipeline, row.stage) for row in devices.rows),
            tell=self._handle,
            delivered=self._deliver,
            given_up=self._give_up,
        )
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, Request] = {}
        self._accepted: dict[str, Accept] = {}
        self._endings: dict[str, Ending] = {}
        self._images: dict[str, State] = {}
        self._checkpoints: dict[str, Checkpoint] = {}  # Of requests that are being restored.
        self._log: list[tuple[Event, int, tuple[Action, ...]]] = []
        self._num_restarts = 0
        self.num_servers = 1
        self._num_events = 0
        self._is_given_up = False
        self._observe: Observe | None = None

    @property
    def num_ended(self) -> int:
        """Requests that have ended so far."""
        return len(self._endings)

    @property
    def strikes(self) -> Mapping[str, int]:
        """How often each fault has happened so far."""
        return self._dice.strikes_by_name

    def run(
        self,
        requests: Iterable[Request],
        cancels: Iterable[tuple[int, str]] = (),
        observe: Observe | None = None,
        limit_ns: int | None = None,
    ) -> Trace:
        """Run until nothing is left to happen.

        Args:
            requests: each enters at its `arrival_ns`; ties enter in the order given.
            cancels: (time, uid) of clients that go away.
            observe: called after each event with what the controller answered, for checks and progress.

        Raises:
            Forgotten, Unfaithful: see there.
            Endless: it goes on beyond `limit_ns`.
        """
        requests, self._observe = list(requests), observe
        self.cluster.start()
        for request in requests:
            assert request.uid not in self._requests, f"two requests have the uid {request.uid}"
            self._requests[request.uid] = self._dated(request)
            self._clock.at(request.arrival_ns, partial(self._submit, request.uid))
        for at_ns, uid in cancels:
            self._clock.at(at_ns, partial(self._handle, Cancelled(uid, "the client went away")))
        self._clock.run(limit_ns)
        forgotten = [request.uid for request in requests if request.uid not in self._endings]
        if forgotten:
            raise Forgotten(f"nothing is left to happen, and {', '.join(forgotten)} never ended")
        endings = tuple(self._endings[request.uid] for request in requests)
        return Trace(runs=tuple(self.cluster.runs), endings=endings, num_events=self._num_events)

    def _dated(self, request: Request) -> Request:
        """A request as its receiver dates it, whose clock may be off."""
        if not self._dice.strikes("skew"):
            return request
        skew_ns = round((self._dice.share("skew") * 2 - 1) * self._dice.faults.size("skew") * NS_PER_S)
        deadline_ns = None if request.deadline_ns is None else request.deadline_ns + skew_ns
        return replace(request, arrival_ns=request.arrival_ns + skew_ns, deadline_ns=deadline_ns)

    def _submit(self, uid: str) -> None:
        if self._is_given_up:
            self._end(uid, Status.REJECTED, "no device is left")
            return
        self._works.expect(self._requests[uid])
        self._handle(Submitted(self._requests[uid]))

    def _requests_of(self, job_ids: Sequence[int]) -> list[Request]:
        return [self._jobs[job_id] for job_id in job_ids]

    def _handle(self, event: Event) -> None:
        now_ns = self._clock.now_ns
        if self._clock.is_asleep:
            self._clock.at(self._clock.back_ns, self._of_server(partial(self._handle, event)))
            return
        self._num_events += 1
        actions = self.controller.handle(event, now_ns)
        if self._is_logged:
            self._log.append((event, now_ns, actions))
        for action in actions:
            self._perform(action)
        if self._observe is not None:
            self._observe(event, actions, now_ns)
        if self._has_faults and self._num_restarts < _MOST_RESTARTS and self._is_in_danger(event):
            self._endanger()

    def _is_in_danger(self, event: Event) -> bool:
        """A server that is restored is told of everything at once."""
        return not isinstance(event, Restored) and not self._clock.is_asleep

    # Actions.

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid):
                self._accepted[uid] = action
                self._jobs[job_id] = self._requests[uid]
                self.cluster.begin(job_id, self._checkpoints.pop(uid, _NOTHING))
            case Reject(uid, reason):
                self._end(uid, Status.REJECTED, reason)
            case Finish(job_id, uid, status, reason):
                self._end(uid, status, reason)
                self.cluster.end(job_id)
            case WakeAt(at_ns):
                self._clock.at(at_ns, self._of_server(partial(self._handle, Woke())))
            case _:
                self.cluster.perform(action)

    def _deliver(self, job_id: int, image: State) -> None:
        self._images[self._jobs[job_id].uid] = image

    def _end(self, uid: str, status: Status, reason: str) -> None:
        assert uid not in self._endings, f"request {uid} ended twice"
        accepted = self._accepted.get(uid)
        self._endings[uid] = Ending(
            request=self._requests[uid],
            status=status,
            finish_ns=self._clock.now_ns + (0 if status is Status.REJECTED else self.config.result_ns),
            job_id=None if accepted is None else accepted.job_id,
            eta_ns=None if accepted is None else accepted.eta_ns,
            reason=reason,
            image=self._images.pop(uid, None) if status is Status.DONE else None,
        )

    @property
    def open(self) -> list[str]:
        """What was accepted and has not ended, in order of acceptance."""
        return [uid for uid in self._accepted if uid not in self._endings]

    def _give_up(self) -> None:
        self._is_given_up = True
        for uid in self.open:
            self._handle(Cancelled(uid, "every worker was lost, and none could be started again"))

    # The controller is lost, too.

    def _endanger(self) -> None:
        for kind, mishap in (("replay", self._replay), ("restart", self._restart)):
            if self._dice.strikes(kind):
                self._num_restarts += 1
                self._clock.sleep_until(self._clock.now_ns + round(self._dice.extent(kind) * NS_PER_S), mishap)
                return

    def _replay(self) -> None:
        """The controller of the log takes over where the former one was; devices have gone on meanwhile."""
        controller = self._make_controller(self.controller.config, self._table)
        for index, (event, at_ns, actions) in enumerate(self._log):
            if controller.handle(event, at_ns) != actions:
                raise Unfaithful(f"event {index} of the log, {event!r}, is answered otherwise when it is replayed")
        self.controller = controller
        self.cluster.serve(controller)

    def _restart(self) -> None:
        """A new controller is told of what had been accepted; everything else begins anew."""
        self.num_servers += 1
        self._is_given_up = False
        left = {self._jobs[job_id].uid: checkpoint for job_id, checkpoint in self.cluster.lose_all().items()}
        open_now = self.open
        self._log.clear()
        self.controller = self._make_controller(self.controller.config, self._table)
        self.cluster.restart(self.controller)
        for uid in open_now:
            self._checkpoints[uid] = checkpoint = left.get(uid, _NOTHING)
            self._handle(Restored(self._requests[uid], checkpoint.steps_done if checkpoint.blobs else None))
        self.cluster.start()

    def _of_server(self, call: Callable[[], None]) -> Callable[[], None]:
        """The server that wanted this may be gone when its time comes."""
        server = self.num_servers
        return lambda: call() if server == self.num_servers else None
