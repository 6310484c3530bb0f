"""Keeps promises, whatever the policy wants: see `policy.promises` for the theory of operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilework.core.interfaces import ClusterView, CostModel, Demand, GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import DIFFUSE, Group, Start
from tilework.policy.chunks import WORKS_PER_LANE
from tilework.policy.demand import demand_at, usable_degree
from tilework.policy.promises import GUARD_MARGIN, Block, slacks_ns

_NEVER = 1 << 62
Degrees = Callable[[Request, CostModel], Sequence[int]]
_MOST_OFFENDERS = 2


def blocks_of(gpus: Iterable[GpuView], promised: Iterable[JobView]) -> list[Block]:
    """The blocks of promised jobs."""
    free_ns = {gpu.gpu: gpu.free_ns for gpu in gpus}
    return [_block(job, free_ns) for job in promised]


def _block(job: JobView, free_ns: Mapping[int, int]) -> Block:
    assert job.promised is not None
    assert job.request.deadline_ns is not None
    ready_ns = max((free_ns[gpu] for work in job.works for gpu in work.gpus if gpu in free_ns), default=0)
    return Block(job.request.deadline_ns, ready_ns, job.promised)


@dataclass(slots=True, kw_only=True)
class Guard:
    """Reviews the starts of a policy, and starts promised jobs itself when they cannot wait any longer.

    A whole check places the blocks of all promised jobs. It is spared while it cannot fail: a delay of all devices by
    some time delays no block by more, so what the last check found to spare bounds what has happened since.
    """

    chunk_ns: int = 200 * NS_PER_MS
    _spare_ns: int = field(default=0, init=False)
    _basis_ns: dict[int, int] = field(default_factory=dict, init=False)

    def recheck(self) -> None:
        """Forget what the last check has found: there is a new promise."""
        self._basis_ns.clear()

    def review(self, starts: tuple[Start, ...], view: ClusterView, costs: CostModel, now_ns: int) -> tuple[Start, ...]:
        """Those of a policy's starts that endanger no promise; each job's starts together or not at all.

        A promise that is in danger already must not get worse.
        """
        if not starts or not _has_something_to_guard(view):
            return starts
        scene = _Scene.now(view, costs)
        after = scene.plus(starts)
        if self._is_harmless(after):
            return starts
        limits = [min(0, slack_ns) for slack_ns in scene.slacks_ns(now_ns)]
        if self._keeps(after, limits, now_ns):
            return starts
        return self._sift(_by_job(starts, view), scene, limits, now_ns)

    def widened(self, view: ClusterView, costs: CostModel, degrees: Degrees, now_ns: int) -> dict[int, Demand]:
        """Wider blocks for promised jobs that are in danger, where that helps them and harms nobody; by job id.

        `degrees` says at which degrees the policy may run a request.
        """
        scene = _Scene.now(view, costs)
        if not _has_something_to_guard(view) or self._is_harmless(scene):
            return {}
        slacks = self._checked(scene, now_ns)
        for index, job in enumerate(view.promised()):
            if slacks[index] < 0:
                slacks = self._widen(index, job, scene, degrees(job.request, costs), slacks, now_ns)
        self.recheck()
        return {job.job_id: scene.block(job).demand for job in view.promised() if job.job_id in scene.widths}

    def _widen(
        self, index: int, job: JobView, scene: _Scene, degrees: Sequence[int], slacks: list[int], now_ns: int
    ) -> list[int]:
        """Returns the slacks after it."""
        width = scene.block(job).demand.width
        for degree in degrees:
            if degree > width:
                scene.widths[job.job_id] = degree
                wider = scene.slacks_ns(now_ns)
                if wider[index] > slacks[index] and _harms_nobody(wider, slacks):
                    return wider
                del scene.widths[job.job_id]
        return slacks

    def forced(self, view: ClusterView, costs: CostModel, now_ns: int) -> tuple[Start, ...]:
        """What promised jobs must start now since it cannot wait: all up to the last one that has nothing to spare."""
        scene = _Scene.now(view, costs)
        if not _has_something_to_guard(view) or self._is_harmless(scene):
            return ()
        slacks = self._checked(scene, now_ns)
        last = max((index for index, slack_ns in enumerate(slacks) if slack_ns <= 0), default=-1)
        return tuple(self._starts(scene, view.promised()[: last + 1]))

    def wake_ns(self, view: ClusterView, now_ns: int) -> int | None:
        """When to look again at the latest, though nothing happens: idle devices use up what there is to spare."""
        if not _has_something_to_guard(view) or all(job.works for job in view.promised()):
            return None
        idle = [self._basis_ns.get(gpu.gpu, now_ns) for gpu in view.gpus if not gpu.works]
        return max(now_ns + NS_PER_MS, min(idle) + self._spare_ns) if idle else None

    def _is_harmless(self, scene: _Scene) -> bool:
        if self._spare_ns <= 0 or scene.free_ns.keys() != self._basis_ns.keys():
            return False
        return all(free_ns - self._basis_ns[gpu] < self._spare_ns for gpu, free_ns in scene.free_ns.items())

    def _checked(self, scene: _Scene, now_ns: int) -> list[int]:
        """The slack of each promise; the least is remembered."""
        slacks = scene.slacks_ns(now_ns)
        self._spare_ns, self._basis_ns = min(slacks, default=_NEVER), dict(scene.free_ns)
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
            after = scene.plus(part)
            if self._keeps(after, limits, now_ns):
                kept, scene = kept + part, after
            elif (num_offenders := num_offenders + 1) == _MOST_OFFENDERS:
                break
        self.recheck()
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
            if cursor.stage is None:
                continue
            group = scene.group(block, job.last_gpus)
            start = self._piece(job, cursor, group, scene.costs)
            if held.isdisjoint(group) and all(room[gpu] for gpu in start.gpus):
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
    """When devices will be free and where jobs will stand, after starts that have not been made yet."""

    view: ClusterView
    costs: CostModel
    free_ns: dict[int, int]
    nodes: dict[int, int]
    cursors: dict[int, Cursor] = field(default_factory=dict)
    ready_ns: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def now(view: ClusterView, costs: CostModel) -> _Scene:
        free_ns = {gpu.gpu: gpu.free_ns for gpu in view.gpus}
        return _Scene(view, costs, free_ns, {gpu.gpu: gpu.node for gpu in view.gpus})

    def plus(self, starts: Sequence[Start]) -> _Scene:
        after = replace(self, free_ns=dict(self.free_ns), cursors=dict(self.cursors), ready_ns=dict(self.ready_ns))
        for start in starts:
            after._add(start)
        return after

    def _add(self, start: Start) -> None:
        jobs = [job for job_id in start.job_ids if (job := self.view.job(job_id)) is not None]
        work_ns = self.costs.work_ns(start.stage, [job.request for job in jobs], len(start.gpus), start.num_steps)
        ready_ns = [self.ready_ns.get(job.job_id, 0) for job in jobs]
        end_ns = max([*ready_ns, *(self.free_ns[gpu] for gpu in start.gpus)]) + work_ns
        self.free_ns.update(dict.fromkeys(start.gpus, end_ns))
        for job in jobs:
            self.cursors[job.job_id] = self.cursor(job).advanced(start.num_steps)
            self.ready_ns[job.job_id] = end_ns

    def cursor(self, job: JobView) -> Cursor:
        return self.cursors.get(job.job_id) or Cursor(job.stage, job.num_steps_left)

    def block(self, job: JobView) -> Block:
        block = _block(job, self.free_ns)
        if job.job_id not in self.cursors and job.job_id not in self.widths:
            return block
        width = self.widths.get(job.job_id, block.demand.width)
        left = demand_at(job.request, self.cursor(job), width, self.costs)
        return Block(block.due_ns, self.ready_ns.get(job.job_id, block.ready_ns), left)

    def slacks_ns(self, now_ns: int) -> list[int]:
        levels = [sorted(self.free_ns[gpu] for gpu in node) for node in self._by_node()]
        return slacks_ns(levels, [self.block(job) for job in self.view.promised()], GUARD_MARGIN, now_ns)

    def _by_node(self) -> list[list[int]]:
        by_node: dict[int, list[int]] = {}
        for gpu, node in self.nodes.items():
            by_node.setdefault(node, []).append(gpu)
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


def _harms_nobody(after: Sequence[int], before: Sequence[int]) -> bool:
    return all(new >= min(0, old) for new, old in zip(after, before, strict=True))


def _by_job(starts: Sequence[Start], view: ClusterView) -> list[tuple[Start, ...]]:
    """The starts of all promised jobs, then those of each other job."""
    promised = {job.job_id for job in view.promised()}
    parts: dict[int, list[Start]] = {}
    for start in starts:
        parts.setdefault(-1 if promised.issuperset(start.job_ids) else start.job_ids[0], []).append(start)
    return [tuple(parts[key]) for key in sorted(parts, key=lambda key: key >= 0)]
