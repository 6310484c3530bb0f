"""Starts of the stages of one role, on a group of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.core.work import Group, Start
from tilework.policy.placement.roles import Role, role_of
from tilework.policy.toolkit.demand import optimal_degree


@dataclass(slots=True)
class Launch:
    """The starts of one job, role after role, from what is left of it.

    `left` is what is left after `starts`. A stage on a CPU slot ends it: the controller starts that.
    """

    job_id: int
    request: Request
    left: Cursor
    costs: CostModel
    why: str
    starts: list[Start] = field(default_factory=list)

    @property
    def role(self) -> Role | None:
        """The role of the next stage; None if there is none, or if it runs on a CPU slot."""
        stage = self.left.stage
        if stage is None or stage.kind is DeviceKind.CPU:
            return None
        return role_of(self.costs.graph(stage.pipeline), stage)

    def run(self, role: Role, group: Group, width: int | None = None) -> None:
        """Start all stages of a role that are next: steps, all of them, on the whole group.

        A stage without steps runs on the first `width` devices, or as many as the group has and are optimal for it.
        """
        while self.role is role and (stage := self.left.stage) is not None:
            num_steps = self.left.num_left_here if stage.has_steps else 1
            self.starts.append(
                Start(
                    stage=stage,
                    job_ids=(self.job_id,),
                    devices=group if stage.has_steps else self._part(stage, group, width),
                    num_steps=num_steps,
                    why=self.why,
                )
            )
            self.left = self.left.advanced(num_steps)

    def _part(self, stage: Stage, group: Group, width: int | None) -> Group:
        known: Sequence[int] = [degree for degree in self.costs.degrees(stage) if degree <= (width or len(group))]
        if width is None:
            return group[: optimal_degree(stage, self.request, self.costs, len(group))]
        return group[: max(known, default=1)]
