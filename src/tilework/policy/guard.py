"""Keeps promises, whatever the policy wants: see `policy.promises` for the theory of operation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilework.core.interfaces import Block, ClusterView, CostModel, GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import DIFFUSE, Group, Start
from tilework.policy.chunks import WORKS_PER_LANE
from tilework.policy.demand import demand_at, usable_degree
from tilework.policy.promises import GUARD_MARGIN, slacks_ns

_NEVER = 1 << 62
Degrees = Callable[[Request, CostModel], Sequence[int]]
_FAR_NS = 5 * NS_PER_S
_MOST_OFFENDERS = 2
_MOST_WIDENED = 2


def ready_ns(job: JobView, up: Mapping[int, GpuView]) -> int:
    """When the works of a job have ended; 0 if it has none. `up` holds the devices that are up."""
    if not job.works:
        return 0
    last = job.works[-1]
    return max((up[gpu].end_ns(last) for gpu in last.gpus if gpu in up and last in up[gpu].works), default=0)


@dataclass(slots=True)
class _Bound:
    """No block is in danger before some device or promised job has been delayed by `spare_ns` against `free_ns`."""

    spare_ns: int = 0
    free_ns: dict[int, int] = field(default_factory=dict)

    def covers(self, scene: _Scene) -> bool:
        return self.left_ns(scene) > 0

    def left_ns(self, scene: _Scene) -> int:
        if scene.free_ns.keys() != self.free_ns.keys():
            return 0
        delays = [free_ns - self.free_ns[gpu] for gpu, free_ns in scene.free_ns.items()]
        return self.spare_ns - max([scene.wait_ns, *delays])


@dataclass(slots=True, kw_only=True)
class Guard:
    """Reviews the starts of a policy, and starts promised jobs itself when they cannot wait any longer.

    A check places the blocks of promised jobs. While nothing starts it is spared as long as what the last one found to
    spare is not used up: a delay of all devices by some time delays a block by no more. Blocks with much to spare that
    no urgent one comes behind, the far ones, are treated so also when something starts. (Where jobs in flight are only
    ready later this is not strictly true, which is why those with little to spare are looked at each time.)
    """

    chunk_ns: int = 200 * NS_PER_MS
    _all: _Bound = field(default_factory=_Bound, init=False)
    _far: _Bound = field(default_factory=_Bound, init=False)
    _far_due_ns: int = field(default=0, init=False)
    _next_ns: int = field(default=0, init=False)

    def recheck(self) -> None:
        """Forget what the checks have found: there is a new promise."""
        self._all, self._far = _Bound(), _Bound()

    def review(self, starts: tuple[Start, ...], view: ClusterView, costs: CostModel, now_ns: int) -> tuple[Start, ...]:
        """Those of a policy's starts that endanger no promise; each job's starts together or not at all.

        A promise that is in danger already must not get worse.
        """
        if not starts or not _has_something_to_guard(view):
            return starts
        scene = _Scene.now(view, costs)
        after = scene.plus(starts, now_ns)
        self._choose(after, now_ns)
        scene.num_blocks = after.num_blocks
        limits = [min(0, slack_ns) for slack_ns in scene.slacks_ns(now_ns)]
        if self._keeps(after, limits, now_ns):
            return starts
        return self._sift(_by_job(starts, view), scene, limits, now_ns)

    def widened(self, view: ClusterView, costs: CostModel, degrees: Degrees, now_ns: int) -> dict[int, int]:
        """Greater widths for promised jobs that are in danger, where that helps them and harms nobody; by job id.

        `degrees` says at which degrees the policy may run a request.
        """
        if not _has_something_to_guard(view):
            return {}
        scene = _Scene.now(view, costs)
        if self._all.covers(scene):
            return {}
        self._choose(scene, now_ns)
        slacks = self._checked(scene, now_ns)
        endangered = [index for index, slack_ns in enumerate(slacks) if slack_ns < 0]
        for index in endangered[:_MOST_WIDENED]:
            job = view.promised()[index]
            slacks = self._widen(index, job, scene, degrees(job.request, costs), slacks, now_ns)
        if scene.widths:
            self.recheck()
        return scene.widths

    def _widen(
        self, index: int, job: JobView, scene: _Scene, degrees: Sequence[int], slacks: list[int], now_ns: int
    ) -> list[int]:
        """Returns the slacks after it."""
        width, widest = scene.block(job).demand.width, scene.widest
        for degree in degrees:
            if width < degree <= widest:
                scene.widths[job.job_id] = degree
                wider = scene.slacks_ns(now_ns)
                if wider[index] > slacks[index] and _harms_nobody(wider, slacks):
                    return wider
                del scene.widths[job.job_id]
        return slacks

    def forced(self, view: ClusterView, costs: CostModel, now_ns: int) -> tuple[Start, ...]:
        """What promised jobs must start now since it cannot wait: all up to the last one that has nothing to spare."""
        if not _has_something_to_guard(view):
            return ()
        scene = _Scene.now(view, costs)
        if self._all.covers(scene):
            return ()
        self._choose(scene, now_ns)
        slacks = self._checked(scene, now_ns)
        last = max((index for index, slack_ns in enumerate(slacks) if slack_ns <= 0), default=-1)
        return tuple(self._starts(scene, view.promised()[: last + 1]))

    def wake_ns(self, view: ClusterView, now_ns: int) -> int | None:
        """When to look again at the latest, though nothing happens: idle devices use up what there is to spare."""
        if not _has_something_to_guard(view) or all(job.works for job in view.promised()) or self._next_ns == _NEVER:
            return None
        idle = [self._all.free_ns[gpu.gpu] for gpu in view.gpus if not gpu.works and gpu.gpu in self._all.free_ns]
        return max(now_ns + NS_PER_MS, min(idle) + self._next_ns) if idle else None

    def _choose(self, scene: _Scene, now_ns: int) -> None:
        """How many blocks have to be looked at: those that are not far, unless there is no bound for the far ones."""
        promised = scene.view.promised()
        if not self._far.covers(scene):
            current = _Scene.now(scene.view, scene.costs)
            slacks = current.slacks_ns(now_ns)
            near = next((index for index in range(len(slacks), 0, -1) if slacks[index - 1] < _FAR_NS), 0)
            self._far = _Bound(min(slacks[near:], default=_NEVER), current.free_ns)
            self._far_due_ns = _due_ns(promised[near - 1]) if near else 0
        if self._far.covers(scene):
            scene.num_blocks = bisect_right(promised, self._far_due_ns, key=_due_ns)

    def _checked(self, scene: _Scene, now_ns: int) -> list[int]:
        """The slack of each promise that has to be looked at; the least is remembered."""
        slacks = scene.slacks_ns(now_ns)
        spare_ns = min(slacks, default=_NEVER)
        if scene.num_blocks is not None:
            spare_ns = min(spare_ns, self._far.left_ns(scene))
        self._all = _Bound(spare_ns, dict(scene.free_ns))
        # For those in danger, everything is started for which there is room.
        self._next_ns = min([slack_ns for slack_ns in (*slacks, spare_ns) if slack_ns > 0], default=_NEVER)
        return slacks

    def _keeps(self, scene: _Scene, limits: Sequence[int], now_ns: int) -> bool:
        slacks = self._checked(scene, now_ns)
        return all(slack_ns >= limit for slack_ns, limit in zip(slacks, limits, strict=True))

    def _sift(
        self, parts: Sequence[tuple[Start, ...]], scene: _Scene, limits: Sequence[int], now_ns: int
    ) -> tuple[Start, ...]:
        """Take part by part what keeps the promises, until some do not."""
        kept: tuple[Start, ...] = ()
        num_offenders = 0
        for part in parts:
            after = scene.plus(part, now_ns)
            if self._keeps(after, limits, now_ns):
                kept, scene = kept + part, after
            elif (num_offenders := num_offenders + 1) == _MOST_OFFENDERS:
                break
        self._all = _Bound()
        return kept

    # Starting promised jobs.

    def _starts(self, scene: _Scene, jobs: Sequence[JobView]) -> Iterator[Start]:
        """The next piece of each job, where the certificate places it, as long as there is room.

        Not behind the block of another job, of which only the first piece has been started: the rest would then wait.
        """
        held: set[int] = set()
        room = {gpu.gpu: WORKS_PER_LANE - len(gpu.works) for gpu in scene.view.gpus}
        for job in jobs:
            block = scene.block(job)
            cursor = scene.cursor(job)
            if len(held) == len(room):
                return
            if cursor.stage is None:
                continue
            group = scene.group(block, job.last_gpus)
            start = self._piece(job, cursor, group, scene.costs)
            if held.isdisjoint(group) and all(room[gpu] > 0 for gpu in start.gpus):
                for gpu in start.gpus:
                    room[gpu] -= 1
                yield start
            scene.hold(block, group)
            held.update(group)

    def _piece(self, job: JobView, cursor: Cursor, group: Group, costs: CostModel) -> Start:
        assert cursor.stage is not None
        degree, num_steps = 1, 1
        if cursor.stage.name == DIFFUSE:
            degree = usable_degree(cursor.stage, len(group), costs)
            step_ns = costs.work_ns(cursor.stage, (job.request,), degree)
            num_steps = max(1, min(cursor.num_steps_left, self.chunk_ns // max(1, step_ns)))
        why = "its deadline is promised, and it cannot wait any longer"
        return Start(stage=cursor.stage, job_ids=(job.job_id,), gpus=group[:degree], num_steps=num_steps, why=why)


@dataclass(slots=True)
class _Scene:
    """When devices will be free and where jobs will stand, after starts that have not been made yet.

    Of the promised jobs, the first `num_blocks` are looked at (None: all). `wait_ns` is the longest that a start lets
    one wait that could go on.
    """

    view: ClusterView
    costs: CostModel
    free_ns: dict[int, int]
    up: dict[int, GpuView]
    cursors: dict[int, Cursor] = field(default_factory=dict)
    ready_ns: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    num_blocks: int | None = None
    wait_ns: int = 0

    @staticmethod
    def now(view: ClusterView, costs: CostModel) -> _Scene:
        free_ns = {gpu.gpu: gpu.free_ns for gpu in view.gpus}
        return _Scene(view, costs, free_ns, {gpu.gpu: gpu for gpu in view.gpus})

    def plus(self, starts: Sequence[Start], now_ns: int) -> _Scene:
        after = replace(self, free_ns=dict(self.free_ns), cursors=dict(self.cursors), ready_ns=dict(self.ready_ns))
        for start in starts:
            after._add(start, now_ns)
        return after

    def _add(self, start: Start, now_ns: int) -> None:
        jobs = [job for job_id in start.job_ids if (job := self.view.job(job_id)) is not None]
        work_ns = self.costs.work_ns(start.stage, [job.request for job in jobs], len(start.gpus), start.num_steps)
        readies = [self.ready_ns.get(job.job_id) or ready_ns(job, self.up) for job in jobs]
        start_ns = max([*readies, *(self.free_ns[gpu] for gpu in start.gpus)])
        waits = [start_ns - max(now_ns, ready) for job, ready in zip(jobs, readies, strict=True) if job.promised]
        self.wait_ns, end_ns = max([self.wait_ns, *waits]), start_ns + work_ns
        self.free_ns.update(dict.fromkeys(start.gpus, end_ns))
        for job in jobs:
            self.cursors[job.job_id] = self.cursor(job).advanced(start.num_steps)
            self.ready_ns[job.job_id] = end_ns

    def cursor(self, job: JobView) -> Cursor:
        return self.cursors.get(job.job_id) or Cursor(job.stage, job.num_steps_left)

    def block(self, job: JobView) -> Block:
        assert job.promised is not None
        block = replace(job.promised, ready_ns=ready_ns(job, self.up))
        if job.job_id not in self.cursors and job.job_id not in self.widths:
            return block
        width = self.widths.get(job.job_id, block.demand.width)
        left = demand_at(job.request, self.cursor(job), width, self.costs)
        return Block(block.due_ns, self.ready_ns.get(job.job_id, block.ready_ns), left)

    def slacks_ns(self, now_ns: int) -> list[int]:
        levels = [sorted(self.free_ns[gpu] for gpu in node) for node in self._by_node()]
        return slacks_ns(levels, self._blocks(), GUARD_MARGIN, now_ns)

    def _blocks(self) -> list[Block]:
        promised, blocks = self.view.promised(), list(self.view.reserved()[: self.num_blocks])
        for job_id in self.cursors.keys() | self.widths.keys():
            job = self.view.job(job_id)
            if job is not None and job.promised is not None:
                rank = bisect_left(promised, _due(job), key=_due)
                if rank < len(blocks):
                    blocks[rank] = self.block(job)
        return blocks

    @property
    def widest(self) -> int:
        return max(map(len, self._by_node()))

    def _by_node(self) -> list[list[int]]:
        by_node: dict[int, list[int]] = {}
        for gpu, device in self.up.items():
            by_node.setdefault(device.node, []).append(gpu)
        return list(by_node.values())

    def group(self, block: Block, preferred: Group) -> Group:
        """The devices that `plane.place` would let a block take; among equals those that have its state, by id."""
        best: tuple[tuple[bool, int], list[int]] | None = None
        for node in self._by_node():
            gpus = sorted(node, key=lambda gpu: (self.free_ns[gpu], gpu in preferred, -gpu))
            width = min(block.demand.width, len(gpus))
            start_ns = max(self.free_ns[gpus[width - 1]], block.ready_ns)
            rank = (len(gpus) < block.demand.width, start_ns)
            if best is None or rank < best[0]:
                best = rank, [gpu for gpu in gpus if self.free_ns[gpu] <= start_ns][-width:]
        assert best is not None, "no device is up"
        return tuple(sorted(best[1]))

    def hold(self, block: Block, group: Group) -> None:
        """Let a block have its devices to its end."""
        end_ns = max([block.ready_ns, *(self.free_ns[gpu] for gpu in group)]) + block.demand.run_ns
        self.free_ns.update(dict.fromkeys(group, end_ns))


def _has_something_to_guard(view: ClusterView) -> bool:
    return bool(view.promised()) and bool(view.gpus)


def _due_ns(job: JobView) -> int:
    return _due(job)[0]


def _due(job: JobView) -> tuple[int, int]:
    assert job.promised is not None
    return job.promised.due_ns, job.job_id


def _harms_nobody(after: Sequence[int], before: Sequence[int]) -> bool:
    return all(new >= min(0, old) for new, old in zip(after, before, strict=True))


def _by_job(starts: Sequence[Start], view: ClusterView) -> list[tuple[Start, ...]]:
    """The starts of all promised jobs, then those of each other job."""
    promised = {job.job_id for job in view.promised()}
    parts: dict[int, list[Start]] = {}
    for start in starts:
        parts.setdefault(-1 if promised.issuperset(start.job_ids) else start.job_ids[0], []).append(start)
    return [tuple(parts[key]) for key in sorted(parts, key=lambda key: key >= 0)]
