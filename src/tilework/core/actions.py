"""Actions: the controller's only output, in the imperative.

A driver performs the actions of one `handle` call in order; commands for one device reach it in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.component import LoadSource
from tilework.core.graph.stage import Stage
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.work import Group, NewPlacement, Work


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the client that its request is accepted, and when it is expected to be done.

    Nine of ten such requests are done by `eta_p90_ns`. With `uses_cache` the job uses its spare cache from the start:
    it would be late without it.
    """

    job_id: int
    uid: str
    eta_ns: int
    eta_p90_ns: int
    why: str
    uses_cache: bool = False

    def accepted(self, request: Request) -> Request:
        """Return the request as it is accepted."""
        return request.with_spare_cache if self.uses_cache else request


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the request. Admission answers with it, and the client is told.

    `earliest_ns` is the earliest deadline that could be met, if there is one. `retry_ns` is the predicted time until
    the same request can be accepted; None where waiting does not help, or nothing is predicted.
    """

    uid: str
    reason: str
    earliest_ns: int | None
    code: RefusalCode
    retry_ns: int | None = None


@dataclass(frozen=True, slots=True)
class DropToBestEffort:
    """Record that a job cannot be on time any more; it is served after the jobs that can."""

    job_id: int
    why: str


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Record that a start or a stop, which the policy wanted for a job, is held back: it would put a promise at risk.

    Sent once per job until one of its works starts or makes progress, however often the policy asks.
    """

    job_id: int
    is_start: bool


@dataclass(frozen=True, slots=True)
class UseCache:
    """Let the steps of a job that follow its committed works use its spare cache: the job would be late without it."""

    job_id: int
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class RunWork:
    """Run a work on its group."""

    work: Work


@dataclass(frozen=True, slots=True)
class Stop:
    """End this work at its next step boundary; revoke it if it has not begun."""

    work_id: int


@dataclass(frozen=True, slots=True)
class MoveState:
    """Move a job's state, as it will be when the job's works so far have ended, to `targets`.

    Later works of the job wait for it there. `stages` are the indices, on the job's way, of the stages that are done by
    then whose outputs the targets lack and later stages need.
    """

    job_id: int
    targets: tuple[int, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropState:
    """Forget everything about a job on these devices."""

    job_id: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadComponents:
    """Load components onto a device, after the works that it has: the next work, of this stage, needs them.

    If `is_ahead`, no work waits for them yet. Works that do not need them do not wait: the load is paused while they
    run. A component that is dropped before it is loaded is never loaded.

    `components` are their digests. The device reads them from `source`, or from the next best source that has them. It
    waits for those that its host is reading (`ReadComponents`). The host keeps what the device reads from the disk; if
    it lacks room, it forgets `forgets` first, in this order.

    Answered by `ComponentsLoaded`. A device that cannot load them is lost.
    """

    load_id: int
    device_id: int
    stage: Stage
    components: tuple[str, ...]
    num_bytes: int
    source: LoadSource
    forgets: tuple[str, ...] = ()
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DropComponents:
    """Free the memory of components on a device, after its works: later works or loads need the room."""

    device_id: int
    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Record which stages devices are for from now on, and why. It moves nothing: weights follow the works."""

    placement: NewPlacement


@dataclass(frozen=True, slots=True)
class ReadComponents:
    """Let the host of a node read components, by digest, from the disk, while its devices do other things.

    The components are those of a stage that the node lacks. If the host lacks room, it forgets `forgets` first, in this
    order. Answered by `ComponentsRead`.
    """

    read_id: int
    node: int
    stage: Stage
    components: tuple[str, ...]
    num_bytes: int
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """Begin the measurement that was asked for on these devices, which have no works. Later works wait for its end.

    Answered by `MeasurementEnded`.
    """

    measurement_id: int
    devices: Group


@dataclass(frozen=True, slots=True)
class Finish:
    """End a job: done, failed, cancelled or expired. Each job ends exactly once."""

    job_id: int
    uid: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send the event `Woke` at this time."""

    at_ns: int


def jobs_of(action: Action) -> tuple[int, ...]:
    """Return the ids of the jobs that an action is about."""
    match action:
        case RunWork(work):
            return work.job_ids
        case (
            Accept(job_id)
            | DropToBestEffort(job_id)
            | HoldBack(job_id)
            | UseCache(job_id)
            | MoveState(job_id)
            | DropState(job_id)
            | Finish(job_id)
        ):
            return (job_id,)
        case _:
            return ()


Action = (
    Accept
    | Reject
    | DropToBestEffort
    | HoldBack
    | UseCache
    | RunWork
    | Stop
    | MoveState
    | DropState
    | LoadComponents
    | DropComponents
    | ReadComponents
    | Place
    | Measure
    | Finish
    | WakeAt
)
