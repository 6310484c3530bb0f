"""Tilework's own policy: look ahead, serve everybody no wider than needed, and give up as few deadlines as possible."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import inf

from tilework.core.interfaces import ClusterView, CostModel, Demand
from tilework.core.progress import Cursor
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Plan, Start
from tilework.policy.lookahead.node_assignment import Homing
from tilework.policy.lookahead.node_table import Nodes
from tilework.policy.lookahead.request_costs import Kinds
from tilework.policy.registry import policy
from tilework.policy.toolkit.demand import demand_at
from tilework.policy.toolkit.elastic import Elastic

_MOST_WAITING = 24  # Looked at per node: the most urgent.
_MOST_SIZES = 256
_LATELY_NS = 60 * NS_PER_S

_Size = tuple[str, Shape, int, bool, int]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last request of a size: when it came, what it takes, how long it could wait and be on time if narrow."""

    at_ns: int
    device_ns: int
    slack_ns: float


@policy("tilework")
@dataclass(slots=True, kw_only=True)
class Tilework(Elastic):
    """Keep as many deadlines as possible, at every event: see `Lookahead` for a node, `Homing` for who is served where.

    Requests without a deadline go by how long they have waited for how much (see `Homing`), each at the degree up to
    which a doubling pays. Nobody waits for ever: behind the point of `DeadlineOrder`, and `patience` times its GPU-time
    after it, a request goes before all that are due. Those whose deadline cannot be met go by that point all along.
    """

    chunk_ns: int = 200 * NS_PER_MS
    patience: float = 20.0
    _kinds: Kinds = field(default_factory=Kinds, init=False)
    _seen: dict[_Size, _Seen] = field(default_factory=dict, init=False)
    _nodes: Nodes | None = field(default=None, init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """What the request takes is known from `demand`, which admission asks for first."""
        urgency_ns = self.order.urgency_ns(request, dropped_to_best_effort, delay_ns)
        if request.deadline_ns is not None and not dropped_to_best_effort:
            return urgency_ns
        seen = self._seen.get(_size(request))
        return urgency_ns + int(self.patience * (seen.device_ns if seen else 0) / request.weight)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        demand = Elastic.demand(self, request, left, costs)  # Dataclasses with slots know no super().
        if left == Cursor.start(request):
            narrowest = demand_at(request, left, self.degrees(request, costs)[0], costs)
            slack_ns = (
                inf if request.deadline_ns is None else request.deadline_ns - request.arrival_ns - narrowest.run_ns
            )
            self._seen.pop(_size(request), None)
            self._seen[_size(request)] = _Seen(request.arrival_ns, demand.width * demand.run_ns, slack_ns)
            if len(self._seen) > _MOST_SIZES:
                del self._seen[next(iter(self._seen))]
        return demand

    def _calm_ns(self, now_ns: int) -> float:
        """How long somebody could wait, of those who come these days, and still be on time on the narrowest group."""
        recent = (seen.slack_ns for seen in self._seen.values() if seen.at_ns > now_ns - _LATELY_NS)
        return min((slack_ns for slack_ns in recent if slack_ns > 0), default=inf)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        if self._nodes is None or self._nodes.devices is not view.devices:
            self._nodes = Nodes(view.devices)
        nodes = self._nodes
        homing = Homing(nodes, self._kinds, view, costs, now_ns, self.chunk_ns, self._calm_ns(now_ns))
        homing.settle(list(islice(view.waiting(), _MOST_WAITING * len(nodes.by_node))))
        doomed = [each for number in sorted(nodes.stirred) for each in homing.at(number).doomed()]
        if doomed:
            return Plan(dropped_to_best_effort=tuple(doomed))
        homing.choose()
        starts: list[Start] = []
        stops: list[int] = []
        for number in sorted(nodes.stirred):
            node = homing.at(number)
            node.carry_out()
            starts += node.starts
            stops += node.stops
            if not node.starts and not node.stops:
                nodes.stirred.remove(number)
        return Plan(starts=tuple(starts), stops=tuple(stops))


def _size(request: Request) -> _Size:
    """What says how much GPU-time it takes."""
    return request.pipeline, request.shape, request.steps, request.guided, request.preview_every
