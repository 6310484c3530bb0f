"""Starts of the stages of one role, on a group of devices, for one request or for a batch of one class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request
from tilework.core.work import Group, Start
from tilework.cost.demand import optimal_degree
from tilework.policy.placement.roles import Role, role_of

_MOST_GROWTH = 1.2

T = TypeVar("T")


def optimal_batch(stage: Stage, request: Request, costs: CostModel, room_bytes: int) -> int:
    """Return how many such requests a stage runs together: the last doubling that takes less than 1.2 times as long.

    Their activations fit into `room_bytes` of a device. 1 where requests may not share the stage. Raises UnknownCost.
    """
    size = 1
    while stage.spec.batchable:
        twice = (request,) * (2 * size)
        if not costs.fits_together(stage, [one.shape for one in twice]):
            break
        if costs.weights.activation_bytes(stage, twice, 1) > room_bytes:
            break
        if costs.work_ns(stage, twice, 1) >= _MOST_GROWTH * costs.work_ns(stage, twice[:size], 1):
            break
        size *= 2
    return size


def batch_ns(stage: Stage, request: Request, num: int, costs: CostModel, room_bytes: int) -> int:
    """Return how long a stage takes on one device for `num` such requests, in batches of the optimal size.

    A stage with steps: for one step. Raises UnknownCost.
    """
    most = optimal_batch(stage, request, costs, room_bytes)
    return sum(costs.work_ns(stage, some, 1) for some in parts_of((request,) * num, most))


def parts_of(members: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    """Yield the members in their order, `most` at a time."""
    for first in range(0, len(members), most):
        yield tuple(members[first : first + most])


@dataclass(slots=True)
class Launch:
    """The starts of some jobs of one class, nearly always of one, role after role, from what is left of each.

    `left` is what is left of each after `starts`, `request` stands for those of all. A stage on a CPU slot ends it: the
    controller starts that. Several jobs have groups of one device, with `room_bytes` for activations; they run each
    stage in batches of its optimal size.
    """

    job_ids: tuple[int, ...]
    request: Request
    left: Cursor
    costs: CostModel
    why: str
    room_bytes: int = 0
    starts: list[Start] = field(default_factory=list)

    @property
    def role(self) -> Role | None:
        """The role of the next stage; None if there is none, or if it runs on a CPU slot."""
        stage = self.left.stage
        if stage is None or stage.kind is DeviceKind.CPU:
            return None
        return role_of(self.costs.graph(stage.pipeline), stage)

    def run(self, role: Role, group: Group, width: int | None = None, chunk_ns: int | None = None) -> None:
        """Start all stages of a role that are next: steps, all of them, on the whole group.

        A stage without steps runs on the first `width` devices, or as many as the group has and are optimal for it.
        With `chunk_ns`, the last start has as many steps of one stage as take that long, at least one.
        """
        while self.role is role and (stage := self.left.stage) is not None:
            num_steps = self._num_steps(stage, len(group), chunk_ns)
            devices = group if stage.has_steps else self._part(stage, group, width)
            self.starts += [
                Start(stage=stage, job_ids=job_ids, devices=devices, num_steps=num_steps, why=self.why)
                for job_ids in self._batches(stage)
            ]
            self.left = self.left.advanced(num_steps)
            if stage.has_steps and chunk_ns is not None:
                return

    def skip(self, role: Role) -> None:
        """Leave out the stages of a role that are next, which are started by another launch."""
        while self.role is role:
            self.left = self.left.advanced(self.left.num_left_here)

    def _batches(self, stage: Stage) -> Sequence[tuple[int, ...]]:
        if len(self.job_ids) == 1:
            return (self.job_ids,)
        return list(parts_of(self.job_ids, optimal_batch(stage, self.request, self.costs, self.room_bytes)))

    def _num_steps(self, stage: Stage, degree: int, chunk_ns: int | None) -> int:
        num_left = self.left.num_left_here
        if not stage.has_steps or chunk_ns is None:
            return num_left
        step_ns = max(1, self._step_ns(stage, degree))
        return max(1, min(num_left, chunk_ns // step_ns))

    def _step_ns(self, stage: Stage, degree: int) -> int:
        if len(self.job_ids) == 1:
            return self.costs.work_ns(stage, (self.request,), degree)
        return batch_ns(stage, self.request, len(self.job_ids), self.costs, self.room_bytes)

    def _part(self, stage: Stage, group: Group, width: int | None) -> Group:
        known: Sequence[int] = [degree for degree in self.costs.degrees(stage) if degree <= (width or len(group))]
        if width is None:
            return group[: optimal_degree(stage, self.request, self.costs, len(group))]
        return group[: max(known, default=1)]
