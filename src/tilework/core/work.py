"""Works, the unit of scheduling: one or more jobs x one stage x a number of steps x a group of devices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tilework.core.component import LEAST_RECENTLY_USED, Component, DropOrder
from tilework.core.graph.stage import Stage

Group = tuple[int, ...]
"""Sorted ids of devices on one node; the rank of a member is its index."""

NO_JOB = -1
"""Id that stands for no job, in the works of measurements. Jobs are numbered from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A work as a policy asks for it, before it has an id.

    `num_steps` is 1 for stages without steps. On a busy device the work is queued after the device's works, so that the
    device does not idle between them. A work of a batchable stage may have several jobs, the *members*, which share
    forward passes on one device; each does `num_steps` steps, from its own position. `why` is the reason in words, for
    the decision log and for the client of the job. It names no other job, which may be another tenant's. `drop_order`
    says what its devices drop first for what they load, and what their host forgets first for what it reads.
    """

    stage: Stage
    job_ids: tuple[int, ...]
    devices: Group
    num_steps: int
    why: str
    drop_order: DropOrder = LEAST_RECENTLY_USED


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAhead:
    """A load ahead of need: an idle device loads the components of a stage that it lacks, and no job waits for it.

    A work that is started on the device meanwhile waits for the load only if it needs these components; else the load
    is paused. `drop_order` is as in `Start`.
    """

    device_id: int
    stage: Stage
    drop_order: DropOrder = LEAST_RECENTLY_USED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """A read ahead of need: the host of a node reads from the disk the components of a stage that it lacks.

    The devices of the node do other things meanwhile. `forgets` are forgotten first if the host must make room.
    """

    node: int
    stage: Stage
    forgets: tuple[Component, ...] = ()


class Member(NamedTuple):
    """A job in a work, in one of its attempts.

    When the work begins, the job is at `position` on its way (`core.graph.itinerary.Itinerary`), and has made
    `first_step` steps.
    """

    job_id: int
    attempt: int
    position: int
    first_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A `Start` that the controller has accepted, for its `members`, in their order.

    `after` names the works after which it is queued. A `sliced` work takes less memory and more time.
    """

    work_id: int
    stage: Stage
    members: tuple[Member, ...]
    devices: Group
    num_steps: int
    why: str
    after: tuple[int, ...] = ()
    sliced: bool = False
    job_ids: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Policies ask for the jobs of a work at every plan, so the ids are listed once."""
        object.__setattr__(self, "job_ids", tuple([one.job_id for one in self.members]))

    def member(self, job_id: int) -> Member:
        """Return the member with this job. Raises KeyError if it is none."""
        for one in self.members:
            if one.job_id == job_id:
                return one
        raise KeyError(job_id)

    def without(self, left_out: Collection[int]) -> Work:
        """Return the work without these members."""
        if not left_out:
            return self
        return replace(self, members=tuple(one for one in self.members if one.job_id not in left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlacement:
    """The stages that devices are for: each group of devices with the name of what they hold, and the reason."""

    groups: tuple[tuple[Group, str], ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of a policy; an empty plan changes nothing.

    `stops` names jobs whose works end at their next step boundary, or are revoked if they have not begun. The jobs may
    be started again when these works have ended. A job whose `JobView.may_stop` is false is not stopped. Jobs that
    share works with a stopped job are stopped with it, since their later works would begin at other steps; if one of
    them must not stop, none stops.

    `dropped_to_best_effort` names jobs that cannot be on time any more, each with the reason in words. They are served
    after jobs that can, and never starve. `failures` names jobs without works that the policy has no way to serve, each
    with the reason in words: they fail. A plan with either does nothing else, and the next plan is asked for at once.

    `placement` is the stages that devices are for from now on, if that has changed. It is recorded, and has no effect:
    starts follow it.

    `loads` are done after the starts, on devices that are idle then. `reads` begin last, on hosts that do not read
    ahead already.
    """

    starts: tuple[Start, ...] = ()
    loads: tuple[LoadAhead, ...] = ()
    reads: tuple[ReadAhead, ...] = ()
    stops: tuple[int, ...] = ()
    dropped_to_best_effort: tuple[tuple[int, str], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()
    placement: NewPlacement | None = None
    wake_ns: int | None = None
