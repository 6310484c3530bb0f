"""Events: the controller's only input, in the past tense.

Every completion names its work; the controller ignores it if that work is no longer in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request
from tilework.core.work import Group


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was submitted, alone or with `others`. All of them are accepted, or none.

    `positions` are those at which the requests begin, where outputs of their first stages exist already. Empty: all
    begin at 0.
    """

    request: Request
    others: tuple[Request, ...] = ()
    positions: tuple[int, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return (self.request, *self.others)

    @property
    def begun(self) -> tuple[tuple[Request, int], ...]:
        """Each request with its position."""
        positions = self.positions or (0,) * len(self.requests)
        return tuple(zip(self.requests, positions, strict=True))


@dataclass(frozen=True, slots=True)
class Restored:
    """A request that had been accepted before a restart is accepted again, without admission.

    `position` is that of its checkpoint on its way (`core.graph.itinerary.Itinerary`): 0 if nothing was kept.
    """

    request: Request
    position: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request `uid` was cancelled; `reason` is shown to clients that ask about it."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkFinished:
    """A work is done with all its steps, if it has some. `run_ns`: on the device, without the wait in its queue."""

    work_id: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A work ended at a step boundary because it was told to; `steps_done` may be 0 (revoked) or all of its steps."""

    work_id: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """A work raised an error; the states of its jobs on its devices are lost.

    With `state_lost` their blobs are gone, too: the jobs start over. `by_model`: the model raised the error.
    """

    work_id: int
    reason: str
    state_lost: bool = False
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A work of several members ran without this job, since the device lacks the job's state.

    Precedes the work's end. With `state_lost` the job's blobs are gone, too: it starts over.
    """

    work_id: int
    job_id: int
    reason: str
    state_lost: bool = False


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A work needed more memory than a device of its group has, and freed what it had taken.

    The state after `steps_done` of its steps is kept; 0: the state before the work.
    """

    work_id: int
    steps_done: int

    @property
    def why(self) -> str:
        """Reason that is shown for the work's jobs."""
        return "there was not enough memory"


@dataclass(frozen=True, slots=True)
class Broken:
    """A work broke off because a member of its group was lost; a survivor has the state after `steps_done` steps.

    Follows the `DeviceLost` of that member, if there are survivors; until then the work holds their devices.
    """

    work_id: int
    steps_done: int

    @property
    def why(self) -> str:
        """Reason that is shown for the work's jobs."""
        return "a device of its group was lost"


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A device is up. `components` are the digests of those that it has; `memory_bytes` limits them (None: no limit).

    `read` are the digests of those that its host keeps copies of beside them.
    """

    device_id: int
    node: int
    kind: DeviceKind = DeviceKind.ACCELERATOR
    components: tuple[str, ...] = ()
    memory_bytes: int | None = None
    read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentsLoaded:
    """A device has ended a `LoadComponents`, in `run_ns` without the time that it spent on other things.

    `dropped` are those that it was told to drop before they were loaded.
    """

    load_id: int
    device_id: int
    run_ns: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentsRead:
    """A host has ended a `ReadComponents`; `is_kept`: it has the components in memory now."""

    read_id: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device is down; `reason` says why."""

    device_id: int
    reason: str

    @property
    def why(self) -> str:
        """Reason that is shown for the jobs that only this device worked on."""
        return f"device {self.device_id} was lost: {self.reason}"

    @property
    def device_ids(self) -> Group:
        """All devices that are down by this event."""
        return (self.device_id,)

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Positions of jobs that have to go back: none, since no state is lost with a device (see `NodeLost`)."""
        return ()


@dataclass(frozen=True, slots=True)
class LinksChanged:
    """The accelerators `alone`, up or not, now run in no group; all others of a node may share one.

    `is_linking`: some of them are being connected with others of their node, which takes seconds.
    """

    alone: Group
    is_linking: bool


@dataclass(frozen=True, slots=True)
class NodeCordoned:
    """A node is about to leave: these devices, which are up, get no further works.

    They end those that they have. `NodeLost` follows.
    """

    node: int
    device_ids: Group
    reason: str


@dataclass(frozen=True, slots=True)
class NodesSilent:
    """Exactly these nodes have sent nothing for a moment: they may be lost.

    A new promise counts on none of their devices until they send something, which the next such event reports.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeLost:
    """All devices of a node that were up are down at once, and the states that only it had are gone.

    Each of `positions` is a job that has to go back, and the newest position on its way from which it can go on with
    the states that exist elsewhere: 0 if none does.
    """

    node: int
    device_ids: Group
    reason: str
    positions: tuple[tuple[int, int], ...] = ()

    @property
    def why(self) -> str:
        """Reason that is shown for the jobs that the node worked on, or whose states it had."""
        return f"node {self.node} was lost: {self.reason}"


@dataclass(frozen=True, slots=True)
class StatesFetched:
    """A node has fetched `num_bytes` of states from the node `origin`, in `run_ns`."""

    origin: int
    node: int
    num_bytes: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class ModelServed:
    """Requests for a pipeline are served from now on, or may use other LoRAs.

    `costs` is a cost table of this pipeline alone, as its file has it (docs/formats.md).
    """

    costs: str


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """No request for this pipeline is open, and none will come."""

    pipeline: str


@dataclass(frozen=True, slots=True)
class MeasurementAsked:
    """Devices are wanted to measure a model that is being added: `degree` of one pool, for about `run_ns`.

    Any devices will do, or only `devices`. Each needs `room_bytes`, which includes the components that are loaded for
    the measurement; these have the `digests`. The answer is `Measure`. `MeasurementEnded` follows before the next
    measurement is asked for.
    """

    measurement_id: int
    pipeline: str
    degree: int
    run_ns: int
    digests: tuple[str, ...]
    room_bytes: int
    devices: Group | None = None


@dataclass(frozen=True, slots=True)
class MeasurementEnded:
    """A measurement has ended and left nothing on its devices, or it is not wanted any more."""

    measurement_id: int


@dataclass(frozen=True, slots=True)
class Woke:
    """A time that `WakeAt` asked for has been reached."""


Event = (
    Submitted
    | Restored
    | Cancelled
    | WorkFinished
    | Stopped
    | WorkFailed
    | LeftOut
    | OutOfMemory
    | Broken
    | DeviceJoined
    | LinksChanged
    | ComponentsLoaded
    | ComponentsRead
    | DeviceLost
    | NodeCordoned
    | NodeLost
    | NodesSilent
    | StatesFetched
    | ModelServed
    | ModelRemoved
    | MeasurementAsked
    | MeasurementEnded
    | Woke
)
