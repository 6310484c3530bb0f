"""The ways in which a waiting request can be dispatched: on which pool, at which degree, and how long it takes then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tilework.core.graph.stage import Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.shares import PIXELS_PER_TOKEN
from tilework.cost.demand import Speed, optimal_degree, worthwhile
from tilework.policy.placement.feasible import is_placeable
from tilework.policy.placement.launch import batch_ns, optimal_batch
from tilework.policy.placement.profile import ClassProfile, class_profile
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica, role_of
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.toolkit.degrees import efficient_speeds
from tilework.policy.toolkit.tasks import Task

_TOKENS_PER_PENALTY = 1000
_MOST_PENALTY = 100
_MOST_BLOCKS = max(len(one.types) for one in VirtualReplica)  # A class needs no more nodes than that.
_UNKNOWN: tuple[int, tuple[Way, ...]] = (-1, ())


class Way(NamedTuple):
    """A dispatch on `degree` devices of a pool: all that is left takes `run_ns`, of a batch until all of it is done.

    `penalty` is what its communication takes from the reward, in thousandths.
    """

    pool: Pool
    degree: int
    run_ns: int
    penalty: int


class Profiles:
    """The profiles of request classes, each made once; `forget` has them made anew, from what the costs say then.

    `usable_bytes` is what a device has; None: no limit. `most_on_node` is how many devices the largest node has. A
    class that fits on no placement of all nodes takes turns. If a stage fits nowhere even so, which admission refuses
    unless that was learned or devices were lost since, it is tried as if there were no limit, and the controller counts
    its attempts.
    """

    def __init__(self) -> None:
        self.version = 0
        self.usable_bytes: int | None = None
        self.most_on_node = 0
        self._sizes: list[int] = []
        self._known: dict[RequestClass, ClassProfile] = {}
        self._by_uid: dict[str, tuple[Request, ClassProfile]] = {}

    def of(self, request: Request, costs: CostModel) -> ClassProfile:
        """Return the profile of a request. Raises UnknownCost."""
        found = self._by_uid.get(request.uid)
        if found is not None and found[0] is request:
            return found[1]
        key = cost_key(request)
        profile = self._known.get(key)
        if profile is None:
            profile = self._known[key] = self._profile(request, costs)
        self._by_uid[request.uid] = request, profile
        return profile

    def _profile(self, request: Request, costs: CostModel) -> ClassProfile:
        nodes = {index: range(size) for index, size in enumerate(self._sizes[:_MOST_BLOCKS])}
        for takes_turns in (False, True):
            profile = class_profile(request, costs, self.usable_bytes, takes_turns=takes_turns)
            if is_placeable(profile.fits, nodes):
                return profile
        return class_profile(request, costs, None, self.most_on_node)

    def set_devices(self, usable_bytes: int | None, sizes: Iterable[int]) -> None:
        """Learn that nodes have that many devices each now, and that the smallest device has `usable_bytes`."""
        sizes = sorted(sizes, reverse=True)
        if (usable_bytes, sizes) != (self.usable_bytes, self._sizes):
            self.usable_bytes = usable_bytes
            self._sizes = sizes
            self.most_on_node = max(sizes, default=0)
            self.forget()

    def forget(self) -> None:
        self.version += 1
        self._known.clear()
        self._by_uid.clear()


class Ways:
    """Finds the ways of tasks on a layout. They are computed again when the cost model has learned of such requests.

    The time of a way is that of all stages that are left: those that are not on its pool count at their optimal degree
    on an auxiliary, without waiting for it. With `paper_times` they count nothing.

    Source: TridentServe §6.2, C0, and equation 3 of appendix C.2: the penalty grows with the processing length, for
    which stand the pixels, and with what the virtual replica sends between devices. Its constant is missing in our
    text; 1e-6 per token of 256 pixels is far below the reward of a late request.
    """

    def __init__(self, layout: PoolLayout, profiles: Profiles, costs: CostModel, paper_times: bool = False) -> None:
        self._layout = layout
        self._profiles = profiles
        self._costs = costs
        self._paper_times = paper_times
        self._version = profiles.version
        self._known: dict[tuple[ClassProfile, int, int], tuple[int, tuple[Way, ...]]] = {}
        self._together: dict[tuple[ClassProfile, int], tuple[int, int]] = {}

    def is_of(self, layout: PoolLayout) -> bool:
        """Return whether these are the ways on this layout, by profiles that have not been forgotten."""
        return self._layout is layout and self._version == self._profiles.version

    def of(self, task: Task, num: int = 1) -> tuple[Way, ...]:
        """Return the ways of a task, or of a batch of `num` like it, the slowest first; empty if it can run nowhere.

        Tasks that have the same remaining work have the same object: there are many tasks, few of them differ. Raises
        UnknownCost.
        """
        profile = self._profiles.of(task.job.request, self._costs)
        version = self._costs.version_of(task.job.request)
        key = profile, task.job.left.position, num
        known_version, found = self._known.get(key, _UNKNOWN)
        if known_version != version:
            if num > 1:
                ways = self._batch(task, profile, num)
            else:
                ways = self._steps(task, profile) if _has_steps(task, self._costs) else self._alone(task, profile)
            found = tuple(sorted(ways, key=lambda way: (-way.run_ns, way.degree, way.penalty)))
            self._known[key] = version, found
        return found

    def profile_of(self, task: Task) -> ClassProfile:
        """Return the profile of a task's class. Raises UnknownCost."""
        return self._profiles.of(task.job.request, self._costs)

    def most_together(self, task: Task) -> int:
        """Return how many tasks like this one make a batch: the optimum of its steps, if these run best on one device.

        1 without steps.

        Raises UnknownCost.
        """
        request = task.job.request
        profile = self._profiles.of(request, self._costs)
        version = self._costs.version_of(request)
        key = profile, task.job.left.position
        known = self._together.get(key)
        if known is None or known[0] != version:
            degrees = [speed.degree for speed in worthwhile(efficient_speeds(task.group_speeds))]
            stages = [stage for stage, _ in task.job.left.pieces if stage.has_steps and degrees == [1]]
            room_bytes = profile.footprint.room_bytes
            most = min([optimal_batch(stage, request, self._costs, room_bytes) for stage in stages], default=1)
            known = self._together[key] = version, most
        return known[1]

    def _batch(self, task: Task, profile: ClassProfile, num: int) -> Iterator[Way]:
        """Yield the ways of a batch on one primary, where the class fits on one."""
        request = task.job.request
        room_bytes = profile.footprint.room_bytes
        for way in self._steps(task, profile):
            if way.degree > 1:
                continue
            run_ns = way.run_ns
            for stage, num_steps in task.job.left.pieces:
                role = self._role(request, stage)
                if role is Role.E or role in way.pool.kind.roles:  # Each decode elsewhere has devices of its own.
                    alone_ns = self._costs.work_ns(stage, (request,), 1)
                    whole_ns = batch_ns(stage, request, num, self._costs, room_bytes)
                    run_ns += num_steps * (whole_ns - alone_ns)
            yield way._replace(run_ns=run_ns)

    def _role(self, request: Request, stage: Stage) -> Role | None:
        return role_of(self._costs.graph(request.pipeline), stage)

    def _steps(self, task: Task, profile: ClassProfile) -> Iterator[Way]:
        """Yield the ways on primaries, at degrees that are efficient, fit, and are no wider than the pool on some node.

        At the least that fits if no efficient one does.
        """
        request = task.job.request
        fits = profile.fits
        part = self._layout.part_of(request.pipeline)
        unit = min(_MOST_PENALTY, 1 + request.shape.pixels // PIXELS_PER_TOKEN // _TOKENS_PER_PENALTY)
        for replica in self._layout.replicas(request.pipeline, fits):
            pool = Pool(part, replica.primary)
            wide = self._layout.widest(pool)
            index = tuple(VirtualReplica).index(replica)
            for speed in _usable(task.group_speeds, [degree for degree in fits[replica.primary] if degree <= wide]):
                run_ns = task.num_steps * speed.step_ns + self._others_ns(task, replica.primary, speed.degree)
                yield Way(pool, speed.degree, run_ns, index * unit)

    def _alone(self, task: Task, profile: ClassProfile) -> Iterator[Way]:
        """Yield stages of one role before or after the steps: on primaries that hold it, no wider than they can use."""
        request = task.job.request
        graph = self._costs.graph(request.pipeline)
        stage = task.job.left.stage
        role = None if stage is None else role_of(graph, stage)
        if role is None:
            return
        part = self._layout.part_of(request.pipeline)
        optimal = profile.footprint.optimal.get(role, 1)
        for kind in PlacementType:
            pool = Pool(part, kind)
            wide = self._layout.widest(pool)
            degrees = [degree for degree in profile.fits.get(kind, ()) if degree <= wide]
            if role in kind.roles and kind.is_primary and degrees:
                degree = next((one for one in degrees if one >= optimal), degrees[-1])
                yield Way(pool, degree, self._others_ns(task, kind, degree), 0)

    def _others_ns(self, task: Task, kind: PlacementType, degree: int) -> int:
        """Return the time of the stages without steps, and of what follows a stage on a CPU slot."""
        request = task.job.request
        total_ns = task.head_ns + task.tail_ns
        graph = self._costs.graph(request.pipeline)
        for stage, _ in task.job.left.pieces:
            if stage.has_steps or (role := role_of(graph, stage)) is None:
                continue
            total_ns -= self._costs.work_ns(stage, (request,), 1)
            if role in kind.roles:
                own = optimal_degree(stage, request, self._costs, degree)
                total_ns += self._costs.work_ns(stage, (request,), own)
            elif not self._paper_times:
                own = optimal_degree(stage, request, self._costs)
                total_ns += self._costs.work_ns(stage, (request,), own)
        return total_ns


def _has_steps(task: Task, costs: CostModel) -> bool:
    """Return whether role D is ahead of a task, which all stages of a pipeline without steps are."""
    graph = costs.graph(task.job.request.pipeline)
    return any(role_of(graph, stage) is Role.D for stage, _ in task.job.left.pieces)


def _usable(speeds: Sequence[Speed], fitting: Sequence[int]) -> list[Speed]:
    found = [speed for speed in worthwhile(efficient_speeds(speeds)) if speed.degree in fitting]
    return found or [speed for speed in speeds if speed.degree in fitting][:1]
