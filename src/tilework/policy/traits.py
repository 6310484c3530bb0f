"""Optional traits of a policy, beside the four methods of `core.policy.Policy`: a class has one by its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tilework.core.actions import Reject
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request


@runtime_checkable
class NeedsFuture(Protocol):
    """A policy that decides by requests that have not come yet: for comparisons, since only a simulation can run it."""

    def foresee(self, requests: Sequence[Request]) -> None:
        """Learn all future requests, before the first one comes."""


@runtime_checkable
class RefusesRequests(Protocol):
    """A policy that refuses requests for its own reasons, beside those of admission."""

    def refusal(self, request: Request, costs: CostModel, now_ns: int) -> Reject | None:
        """Return the refusal of a request, with `retry_ns`; None if the policy has room for it. Raises UnknownCost.

        Asked while a device is up. Of requests submitted together, each is judged as if the others were not there.
        """


@runtime_checkable
class WeighsJobs(Protocol):
    """A policy that can say what one more job would cost others. It stops works, so admission may do so for it."""

    def num_missed(self, job: JobView, view: ClusterView, costs: CostModel, now_ns: int) -> int:
        """Return how many deadlines of other jobs would be missed with this job that are kept without it.

        The job waits, is not in the view, and is served whatever that costs. No further request is assumed to come.
        Asking changes no decision.
        """


@runtime_checkable
class PredictsEnds(Protocol):
    """A policy that plans so far ahead that it knows when jobs end if no other request comes."""

    def end_ns(self, job: JobView) -> int | None:
        """Return when a job ends by the latest plan, which may be past; None if that plan did not look at it."""


@runtime_checkable
class RemembersPipelines(Protocol):
    """A policy that keeps data about the pipelines for which requests came."""

    def forget(self, pipeline: str, costs: CostModel) -> None:
        """Drop all that is known under a pipeline's name: the next pipeline of that name may be another.

        The pipeline is served no more and has no jobs. `costs` do not know it, or know the next one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """State of the devices of one placement type, as counted by a policy that chooses placements by it.

    Attributes:
        name: the type, as in `NewPlacement`.
        num_devices: the number of devices of this type.
        window_ns: the length of the sliding window.
        completions: requests whose stages they have ended in the window, as predicted when these were started.
        busy_ns: the time for which that kept the devices busy, summed over them.
        backlog: the number of requests that wait for them.
    """

    name: str
    num_devices: int
    window_ns: int
    completions: int
    busy_ns: int
    backlog: int


@runtime_checkable
class PlacesStages(Protocol):
    """A policy that decides which stages each device is for, and when that changes."""

    def placement_status(self, now_ns: int) -> Sequence[PlacementStatus]:
        """Return the types that devices have now, or that requests wait for. Asking changes nothing."""
