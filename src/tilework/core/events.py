"""What happened: the controller's only input, in the past tense.

Every completion carries the work that it answers; the controller ignores one whose work it has already written off.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.request import Request
from tilework.core.work import StageId


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request, and others that come in with it: all of them or none."""

    request: Request
    others: tuple[Request, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return (self.request, *self.others)


@dataclass(frozen=True, slots=True)
class Restored:
    """A request that was accepted before the controller began anew: it is in, whatever admission would say now.

    `steps_done` is how far the state has come that is kept of it, 0 where only its conditioning is; None if nothing is.
    """

    request: Request
    steps_done: int | None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client does not want `uid` any more; `reason` is shown to clients that ask about it."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepsFinished:
    """All steps of a diffuse work are done; they took `run_ns` on the device, without waiting in its queue."""

    work_id: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class StageFinished:
    """A work without steps (encode, decode) is done after `run_ns` on the device."""

    work_id: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A work ended at a step boundary because it was asked to; `steps_done` may be 0 (revoked) or all of them."""

    work_id: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """A work raised an error; what its GPUs have of its jobs is lost.

    With `state_lost` what was put down of them is gone, too: nothing is left but the requests.
    """

    work_id: int
    reason: str
    state_lost: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A work of several members runs without this one, of which its GPU lacks the state. Comes before the work's end.

    With `state_lost` what was put down of it is gone, too: nothing is left but the request.
    """

    work_id: int
    job_id: int
    reason: str
    state_lost: bool = False


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A work needed more memory than a GPU of its group has, and gave back what it had taken.

    The state after `steps_done` of its steps is kept; 0: as it was before the work.
    """

    work_id: int
    steps_done: int

    @property
    def why(self) -> str:
        """What it is to the work's jobs, in words."""
        return "there was not enough memory"


@dataclass(frozen=True, slots=True)
class Broken:
    """A work broke off because a member of its group was lost; a survivor has the state after `steps_done` steps.

    Follows the `DeviceLost` of that member, if it has survivors; until then the work holds their devices.
    """

    work_id: int
    steps_done: int

    @property
    def why(self) -> str:
        """What it is to the work's jobs, in words."""
        return "a device of its group was lost"


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A worker is ready; `stages` are those whose weights it holds."""

    device_id: int
    node: int
    stages: frozenset[StageId]


@dataclass(frozen=True, slots=True)
class DeviceLost:
    device_id: int
    reason: str

    @property
    def why(self) -> str:
        """What it is to the jobs that only this device worked on, in words."""
        return f"device {self.device_id} was lost: {self.reason}"


@dataclass(frozen=True, slots=True)
class Woke:
    """The time asked for by `WakeAt` has come."""


Event = (
    Submitted
    | Restored
    | Cancelled
    | StepsFinished
    | StageFinished
    | Stopped
    | WorkFailed
    | LeftOut
    | OutOfMemory
    | Broken
    | DeviceJoined
    | DeviceLost
    | Woke
)
