"""Devices divided among buckets of requests: what servers do that send each size to machines of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request, StepClass, step_key
from tilework.core.time import NS_PER_MS
from tilework.core.work import Group, Plan
from tilework.cost.demand import Speed, demand_at, step_speeds, usable_degree
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.fixed_groups import Lane, LanePlan, Pick, open_lanes
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.open_devices import has_room
from tilework.policy.toolkit.order import ArrivalOrdered
from tilework_lab.policies.partition.division import (
    Bucket,
    Cluster,
    clusters_by_weight,
    cut_groups,
    equal_clusters,
    power_of_two,
    share,
)

_MOST_WAITING = 512  # Waiting jobs that are looked at: one of a rare bucket may be further behind.
_MOST_CLASSES = 256


@dataclass(slots=True)
class BucketStats:
    """The requests of a bucket that have begun: their number, their device time, and the speeds of the largest."""

    count: int = 0
    device_ns: int = 0
    pixels: int = 0
    speeds: tuple[Speed, ...] = ()


@dataclass(slots=True, kw_only=True)
class Partition(ArrivalOrdered):
    """Serves each bucket of requests in order of arrival on its own devices; a group keeps a request to its end.

    `bucket_of` says which bucket a request belongs to, `degree_of` how wide the groups of a bucket should be. Devices
    are divided in proportion to what `weigh` makes of each bucket, at least one each; without it, each bucket gets the
    same number of groups. With more buckets than devices, neighbours share. Remaining devices become more groups, the
    widest that fit. With `borrows`, a request for which no group of its own is idle goes to an idle one of a narrower
    bucket.

    The division changes on three occasions only: a bucket gets its first request, the devices change, or the number of
    requests has doubled. So it learns what its sources take for granted: which buckets there are, and how often.

    Deadlines, weights and tenants are ignored. Admission predicts as if devices were not divided, and its correction
    learns the difference; the guard of reservations keeps promises, on whatever devices they need.
    """

    bucket_of: Callable[[Request, Sequence[Speed]], Bucket]
    degree_of: Callable[[Sequence[Speed]], int]
    weigh: Callable[[BucketStats], int] | None
    borrows: bool = False
    chunk_ns: int = 200 * NS_PER_MS
    _stats: dict[Bucket, BucketStats] = field(default_factory=dict, init=False)
    _clusters: dict[Bucket, Cluster] = field(default_factory=dict, init=False)
    _groups: dict[Group, Cluster] = field(default_factory=dict, init=False)
    _divided_at: tuple[object, ...] = field(default=(), init=False)
    _classes: ByClass[StepClass, tuple[Bucket, tuple[Speed, ...]]] = field(
        default_factory=partial(ByClass, _MOST_CLASSES), init=False
    )

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        bucket, speeds = self._class_of(request, costs)
        cluster = self._clusters.get(bucket)
        degree = self.degree_of(speeds) if cluster is None else cluster.degree
        return (usable_degree(request, degree, costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def _class_of(self, request: Request, costs: CostModel) -> tuple[Bucket, tuple[Speed, ...]]:
        """Return the bucket and the speeds of a request; remembered, so that learned costs do not change its bucket."""
        key = step_key(request)
        found = self._classes.get(key)
        if found is None:
            speeds = step_speeds(request, costs)
            found = self._classes[key] = self.bucket_of(request, speeds), speeds
        return found

    def forget(self, pipeline: str, costs: CostModel) -> None:
        """Forget a pipeline.

        Devices are divided anew if that leaves a bucket without requests. Others keep what was learned.
        """
        self._classes.forget(pipeline)
        known = {bucket for bucket, _ in self._classes.values()}
        left = {bucket: stats for bucket, stats in self._stats.items() if bucket in known}
        if len(left) < len(self._stats):
            self._stats = left
            self._clusters = {}
            self._groups = {}
            self._divided_at = ()

    # The request that a group serves next.

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        if not any(has_room(device) for device in view.devices):
            return Plan()
        queues = self._queues(view, costs)
        if not self._stats:
            return Plan()
        self._divide(view)
        lanes = LanePlan(view, open_lanes(view, self._groups), costs, self.chunk_ns)
        owners: dict[int, Group] = {}

        def choose(lane: Lane) -> Pick | None:
            job = lanes.continued(lane)
            if job is not None and owners.setdefault(job.job_id, lane.ids) == lane.ids:
                return job, "keeps its group until it is finished"
            bucket = self._next_bucket(self._groups[lane.ids], queues)
            if bucket is None:
                return None
            job = queues[bucket].popleft()
            owners[job.job_id] = lane.ids
            self._count(job, costs)
            return job, "has waited longest of its bucket"

        return lanes.plan(choose)

    def _queues(self, view: ClusterView, costs: CostModel) -> dict[Bucket, deque[JobView]]:
        queues: dict[Bucket, deque[JobView]] = {}
        for job in islice(view.waiting(), _MOST_WAITING):
            bucket, speeds = self._class_of(job.request, costs)
            queues.setdefault(bucket, deque()).append(job)
            stats = self._stats.setdefault(bucket, BucketStats())
            if job.request.shape.pixels > stats.pixels:
                stats.pixels = job.request.shape.pixels
                stats.speeds = speeds
        return queues

    def _next_bucket(self, cluster: Cluster, queues: dict[Bucket, deque[JobView]]) -> Bucket | None:
        """Return the bucket that a group serves next: its own that waits longest; else, if it may, a wider one.

        The widest idle groups are asked first, so a request that could use a wider group has none that is idle.
        """
        own = [bucket for bucket in cluster.buckets if queues.get(bucket)]
        if own:
            return min(own, key=lambda bucket: (queues[bucket][0].urgency_ns, queues[bucket][0].job_id))
        wider = (bucket for bucket in sorted(queues) if queues[bucket] and bucket > cluster.buckets[-1])
        return next(wider, None) if self.borrows else None

    # The division of the devices.

    def _count(self, job: JobView, costs: CostModel) -> None:
        """Count a request when its first stage begins."""
        if not job.left.position:
            demand = self.demand(job.request, job.left, costs)
            bucket, _ = self._class_of(job.request, costs)
            stats = self._stats[bucket]
            stats.count += 1
            stats.device_ns += demand.width * demand.run_ns

    def _divide(self, view: ClusterView) -> None:
        """Divide the devices again if request classes, devices or the number of requests have changed."""
        count = sum(stats.count for stats in self._stats.values())
        places = tuple((device.device_id, device.pool) for device in view.devices)
        occasion = tuple(self._stats), places, count.bit_length()
        if occasion != self._divided_at:
            self._divided_at = occasion
            by_node = nodes(view.devices)
            clusters = self._new_clusters(len(view.devices), max(map(len, by_node)))
            self._clusters = {bucket: cluster for cluster in clusters for bucket in cluster.buckets}
            self._groups = cut_groups(clusters, Allocator(by_node))

    def _new_clusters(self, num_devices: int, widest: int) -> list[Cluster]:
        weights = [1 if self.weigh is None else self.weigh(self._stats[bucket]) for bucket in sorted(self._stats)]
        shared = share(sorted(self._stats), weights, num_devices)
        degrees = [self._degree(buckets, widest) for buckets, _ in shared]
        make = equal_clusters if self.weigh is None else clusters_by_weight
        return make(shared, degrees, num_devices)

    def _degree(self, buckets: Sequence[Bucket], widest: int) -> int:
        preferred = max(self.degree_of(self._stats[bucket].speeds) for bucket in buckets)
        return power_of_two(min(preferred, widest))
