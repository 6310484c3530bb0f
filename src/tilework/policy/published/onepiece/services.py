"""The services: stages that have instances of their own, and stages that share them.

Theory of operation. The stages of one role of a pipeline (`placement.roles`) are one service, and pipelines whose
stages have the same weights share it: an encoder that two models have in common is served once. If that makes more
services than there are instances, stages of one role share instances whatever their pipeline, and load what they lack.
If there are still too few, one service has everything.

Source: OnePiece §3.3 and §8.3. It takes for granted that there are enough instances; the two coarser divisions are
ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.policy import CostModel
from tilework.policy.placement.roles import Role, role_of


class Service(NamedTuple):
    """Some roles, of all pipelines, or of those that have these weights for them. `name` is for people."""

    roles: tuple[Role, ...]
    digests: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return self.name


Division = Mapping[str, Mapping[Role, Service]]
"""The service of each role of each pipeline."""

_ALL = Service(tuple(Role), (), "all stages")
_BY_ROLE = {role: Service((role,), (), role.value) for role in Role}


@dataclass(slots=True)
class Services:
    """The services of the pipelines that were seen, as fine as the instances allow."""

    _own: dict[str, Mapping[Role, Service]] = field(default_factory=dict, init=False)
    _known: dict[tuple[Role, tuple[str, ...]], Service] = field(default_factory=dict, init=False)
    _num_instances: int = field(default=0, init=False)
    _now: Division = field(default_factory=dict, init=False)

    def note(self, pipeline: str, costs: CostModel) -> None:
        """Learn the services of a pipeline. Raises UnknownCost."""
        if pipeline in self._own:
            return
        graph = costs.graph(pipeline)
        found: dict[Role, set[str]] = {}
        for stage in graph.stages:
            if (role := role_of(graph, stage)) is not None:
                found.setdefault(role, set()).update(one.digest for one in costs.weights.components(stage))
        self._own[pipeline] = {role: self._service(role, tuple(sorted(own)), pipeline) for role, own in found.items()}
        self._divide()

    def forget(self, pipeline: str) -> None:
        """Forget a pipeline, which is served no more."""
        self._own.pop(pipeline, None)
        left = {service for roles in self._own.values() for service in roles.values()}
        self._known = {key: service for key, service in self._known.items() if service in left}
        self._divide()

    def _service(self, role: Role, digests: tuple[str, ...], pipeline: str) -> Service:
        if not digests:
            return _BY_ROLE[role]
        return self._known.setdefault((role, digests), Service((role,), digests, f"{role} of {pipeline}"))

    def set_instances(self, num: int) -> None:
        """Learn how many instances there are."""
        self._num_instances = num
        self._divide()

    def _divide(self) -> None:
        by_role: Division = {name: {role: _BY_ROLE[role] for role in roles} for name, roles in self._own.items()}
        as_one: Division = {name: dict.fromkeys(roles, _ALL) for name, roles in self._own.items()}
        self._now = next((one for one in (self._own, by_role) if len(_all_of(one)) <= self._num_instances), as_one)

    def knows(self, pipeline: str) -> bool:
        """Return whether a request of a pipeline was seen."""
        return pipeline in self._own

    def all(self) -> Sequence[Service]:
        """Return all services, in the order of the first requests for them: no more than instances, if there is one."""
        return _all_of(self._now)

    def of(self, pipeline: str, role: Role) -> Service:
        """Return the service of a role of a pipeline that was seen."""
        return self._now[pipeline][role]


def _all_of(services: Division) -> list[Service]:
    return list(dict.fromkeys(service for roles in services.values() for service in roles.values()))
