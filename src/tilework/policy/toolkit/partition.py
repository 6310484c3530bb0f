"""Devices divided among kinds of requests: what servers do that send each size to machines of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.interfaces import ClusterView, CostModel, Demand, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_MS
from tilework.core.work import DIFFUSE, ENCODE, Group, Plan, StageId
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.degrees import all_speeds
from tilework.policy.toolkit.demand import Speed, demand_at, usable_degree
from tilework.policy.toolkit.fixed_groups import Choice, Lane, Slots, fill, open_lanes

_HORIZON = 512  # Of those that wait, so many are looked at: one of a rare kind may be further behind.
_MOST_LOOKS = 256

Kind = tuple[int, str]
"""Kinds are ordered: those that come later take more."""


@dataclass(slots=True)
class Census:
    """Of a kind, how many requests have been begun, the GPU-time that they take, and the speeds of the largest."""

    count: int = 0
    device_ns: int = 0
    pixels: int = 0
    speeds: tuple[Speed, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """What some kinds get: so many groups of `degree` devices."""

    kinds: tuple[Kind, ...]
    degree: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class _Look:
    """What a request is to a partition."""

    kind: Kind
    speeds: tuple[Speed, ...]


@dataclass(slots=True, kw_only=True)
class Partition:
    """Serve each kind of requests in order of arrival on devices of its own; a group keeps a request to its end.

    `kind_of` says what kind a request is, `degree_of` how wide the groups of a kind should be. Devices are divided in
    proportion to what `weigh` makes of each kind, one at least; without it, each kind gets the same number of groups.
    With more kinds than devices, neighbours share. What is left over becomes more groups, the widest that fit.
    With `borrows`, a request for which no group of its own is idle goes to an idle one of a narrower kind.

    The division stays as it is but for three occasions: a kind comes for the first time, the devices change, or the
    number of requests has doubled. So it learns what its sources take for granted: which kinds come, and how often.

    Deadlines, weights and tenants are ignored. Admission predicts as if devices were not divided, and is corrected by
    experience; promises are kept by the guard, on whatever devices they need.
    """

    kind_of: Callable[[Request, Sequence[Speed]], Kind]
    degree_of: Callable[[Sequence[Speed]], int]
    weigh: Callable[[Census], int] | None
    borrows: bool = False
    chunk_ns: int = 200 * NS_PER_MS
    _census: dict[Kind, Census] = field(default_factory=dict, init=False)
    _clusters: dict[Kind, Cluster] = field(default_factory=dict, init=False)
    _groups: dict[Group, Cluster] = field(default_factory=dict, init=False)
    _divided: tuple[object, ...] = field(default=(), init=False)
    _looks: dict[tuple[str, Shape, bool, int], _Look] = field(default_factory=dict, init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        look = self._look(request, costs)
        cluster = self._clusters.get(look.kind)
        degree = self.degree_of(look.speeds) if cluster is None else cluster.degree
        return (usable_degree(StageId(request.pipeline, DIFFUSE), degree, costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def _look(self, request: Request, costs: CostModel) -> _Look:
        """Remembered: that costs are learned does not change what kind a request is."""
        key = request.pipeline, request.shape, request.guided, request.preview_every
        look = self._looks.get(key)
        if look is None:
            speeds = all_speeds(request, costs)
            look = self._looks[key] = _Look(self.kind_of(request, speeds), speeds)
            if len(self._looks) > _MOST_LOOKS:
                del self._looks[next(iter(self._looks))]
        return look

    # Who is served where.

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        if not open_lanes(view):
            return Plan()
        queues = self._queues(view, costs)
        if not self._census:
            return Plan()
        self._divide(view)
        lanes = open_lanes(view, self._groups)
        slots = Slots(view, lanes, costs, self.chunk_ns)
        owners: dict[int, Group] = {}

        def choose(lane: Lane) -> Choice | None:
            job = slots.continued(lane)
            if job is not None and owners.setdefault(job.job_id, lane.ids) == lane.ids:
                return job, "keeps its group until it is finished"
            kind = self._next_kind(self._groups[lane.ids], queues)
            if kind is None:
                return None
            job = queues[kind].popleft()
            owners[job.job_id] = lane.ids
            self._count(job, costs)
            return job, "has waited longest of its kind"

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))

    def _queues(self, view: ClusterView, costs: CostModel) -> dict[Kind, deque[JobView]]:
        queues: dict[Kind, deque[JobView]] = {}
        for job in islice(view.waiting(), _HORIZON):
            look = self._look(job.request, costs)
            queues.setdefault(look.kind, deque()).append(job)
            census = self._census.setdefault(look.kind, Census())
            if job.request.shape.pixels > census.pixels:
                census.pixels, census.speeds = job.request.shape.pixels, look.speeds
        return queues

    def _next_kind(self, cluster: Cluster, queues: dict[Kind, deque[JobView]]) -> Kind | None:
        """Whom a group serves next: of its own kinds the one that waits longest; else, if it may, of the next wider.

        Of the idle groups the widest are asked first, so who waits for a wider one has none that is idle.
        """
        own = [kind for kind in cluster.kinds if queues.get(kind)]
        if own:
            return min(own, key=lambda kind: (queues[kind][0].urgency_ns, queues[kind][0].job_id))
        wider = (kind for kind in sorted(queues) if queues[kind] and kind > cluster.kinds[-1])
        return next(wider, None) if self.borrows else None

    # How devices are divided.

    def _count(self, job: JobView, costs: CostModel) -> None:
        """A request is counted when its first stage begins."""
        if job.stage is not None and job.stage.name == ENCODE:
            demand = self.demand(job.request, Cursor.start(job.request), costs)
            census = self._census[self._look(job.request, costs).kind]
            census.count += 1
            census.device_ns += demand.width * demand.run_ns

    def _divide(self, view: ClusterView) -> None:
        """See to it that devices are divided among the kinds that are known."""
        count = sum(census.count for census in self._census.values())
        occasion = tuple(self._census), tuple(device.device_id for device in view.devices), count.bit_length()
        if occasion != self._divided:
            self._divided = occasion
            by_node = nodes(view.devices)
            clusters = self._wanted(len(view.devices), max(map(len, by_node)))
            self._clusters = {kind: cluster for cluster in clusters for kind in cluster.kinds}
            self._groups = _cut(clusters, Allocator(by_node))

    def _wanted(self, num_devices: int, widest: int) -> list[Cluster]:
        weights = [1 if self.weigh is None else self.weigh(self._census[kind]) for kind in sorted(self._census)]
        shared = share(sorted(self._census), weights, num_devices)
        degrees = [self._degree(kinds, widest) for kinds, _ in shared]
        if self.weigh is not None:
            parts = divide([weight for _, weight in shared], num_devices)
            degrees = [min(degree, _power(part)) for degree, part in zip(degrees, parts, strict=True)]
            counts = [part // degree for degree, part in zip(degrees, parts, strict=True)]
        else:
            while sum(degrees) > num_devices:  # The first of the widest gives half of its devices up.
                index = max(range(len(degrees)), key=lambda index: (degrees[index], -index))
                degrees[index] //= 2
            counts = [num_devices // sum(degrees)] * len(degrees)
        return [
            Cluster(kinds, degree, count) for (kinds, _), degree, count in zip(shared, degrees, counts, strict=True)
        ]

    def _degree(self, kinds: Sequence[Kind], widest: int) -> int:
        wished = max(self.degree_of(self._census[kind].speeds) for kind in kinds)
        return _power(min(wished, widest))


def share(kinds: Sequence[Kind], weights: Sequence[int], most: int) -> list[tuple[tuple[Kind, ...], int]]:
    """Kinds and their weights, neighbours put together until there are `most` at most: those that weigh least first."""
    shared: list[tuple[tuple[Kind, ...], int]]
    shared = [((kind,), max(1, weight)) for kind, weight in zip(kinds, weights, strict=True)]
    while len(shared) > most:
        index = min(range(len(shared) - 1), key=lambda index: shared[index][1] + shared[index + 1][1])
        (one, weight), (other, more) = shared[index : index + 2]
        shared[index : index + 2] = [(one + other, weight + more)]
    return shared


def divide(weights: Sequence[int], total: int) -> list[int]:
    """Divide a number in proportion to weights, one at least to each; there must be enough for that.

    One after another goes to whoever has most weight per part that he then has (D'Hondt); ties to the first.
    """
    parts = [1] * len(weights)
    for _ in range(total - len(weights)):
        parts[max(range(len(parts)), key=lambda index: (weights[index] / (parts[index] + 1), -index))] += 1
    return parts


def _cut(clusters: Sequence[Cluster], allocator: Allocator) -> dict[Group, Cluster]:
    """Groups of devices for clusters, the widest first; what is left over goes to the widest for which it is enough."""
    groups: dict[Group, Cluster] = {}
    by_width = sorted(clusters, key=lambda cluster: -cluster.degree)
    for cluster in by_width:
        for _ in range(cluster.num_groups):
            groups[_take(allocator, cluster.degree)] = cluster
    while allocator.num_free():
        fitting = (cluster for cluster in by_width if cluster.degree <= allocator.widest())
        cluster = next(fitting, by_width[-1])
        groups[_take(allocator, cluster.degree)] = cluster
    return groups


def _take(allocator: Allocator, width: int) -> Group:
    """A group of this width, or of half of it, and so on; there must be a device."""
    while (group := allocator.take(width)) is None:
        width //= 2
    return group


def _power(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)
