"""One decision: starts on the devices of a layout, step by step, and what they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Shape
from tilework.core.work import Group, Start
from tilework.cost.demand import optimal_degree
from tilework.policy.placement.launch import Launch, batch_ns, optimal_batch, parts_of
from tilework.policy.placement.profile import ClassProfile
from tilework.policy.placement.roles import PlacementType, Role, role_of
from tilework.policy.published.tridentserve.bids import Bid
from tilework.policy.published.tridentserve.devices import DeviceAllocator
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.published.tridentserve.monitor import PoolRun
from tilework.policy.published.tridentserve.ways import Profiles, Way
from tilework.policy.toolkit.open_devices import LEAD_NS
from tilework.policy.toolkit.starts import devices_text, explain
from tilework.policy.toolkit.tasks import Task, TaskReader

_EncodeKey = tuple[tuple[Stage, ...], Shape | None, int | None]
"""The stages of an encode, the shape if only one may share them, and the job if it may not."""

_BatchKey = int | tuple[Group, ClassProfile, int]
"""A job, or the device, class and position of several."""


@dataclass(slots=True)
class Dispatch:
    """Places tasks on devices, and collects their starts.

    `chunk_ns` is how long a chunk of steps takes. Unless it `is_stage_aware`, a stage without steps gets as many
    devices as the steps have. With `batches`, encodes on auxiliaries are merged. `runs` is what the starts keep each
    pool busy with.
    """

    view: ClusterView
    costs: CostModel
    now_ns: int
    devices: DeviceAllocator
    reader: TaskReader
    profiles: Profiles
    chunk_ns: int
    is_stage_aware: bool
    batches: bool
    starts: list[Start] = field(default_factory=list)
    runs: list[PoolRun] = field(default_factory=list)
    _encodes: dict[_EncodeKey, list[Task]] = field(default_factory=dict)  # Tasks for auxiliaries, not queued yet.
    _keeps: dict[int, bool] = field(default_factory=dict)  # Findings of `_is_kept`, by job.

    @property
    def layout(self) -> PoolLayout:
        return self.devices.layout

    def keep(self, tasks: Sequence[Task]) -> list[Task]:
        """Place the tasks that have begun on their groups; returns the ready ones that are to be dispatched.

        Those that are not ready keep their groups, whether they are among `tasks` or not (`_is_kept`). A task that has
        begun and lost its group is to be dispatched: a device of it is down, or was reserved for another.
        """
        others = []
        for batch in self._begun_together(tasks):
            task = batch[0]
            if not self._has_begun(task):
                others.append(task)
            elif (own := self._own_group(task)) and self.devices.take_whole(own):
                self._start(task, own, self._launch(batch, "keeps its devices until it is finished"))
            else:
                others += [one for one in batch if not self._keeps_on(one)]
        return others

    def _begun_together(self, tasks: Sequence[Task]) -> Iterable[tuple[Task, ...]]:
        """Return the tasks that are ready, in order; together those of one class at the same step on one device."""
        found: dict[_BatchKey, tuple[Task, ...]] = {}
        for task in tasks:
            if self._is_ready(task):
                job = task.job
                key: _BatchKey = job.job_id
                if task.num_steps and len(job.last_devices) == 1 and job.may_share and self._has_begun(task):
                    key = job.last_devices, self._profile(task), job.left.position
                found[key] = (*found.get(key, ()), task)
        return found.values()

    def _keeps_on(self, task: Task) -> bool:
        """Return whether a task's works are not over yet, and its devices not all open; they are kept for it."""
        if not task.job.works:
            return False
        group = task.job.last_devices
        self.devices.keep(group)
        self.devices.take_some(group, len(group))
        return True

    def _is_ready(self, task: Task) -> bool:
        return task.ready_ns <= self.now_ns + LEAD_NS

    def _is_kept(self, device: DeviceView) -> bool:
        """Return whether a device is in the group of a job that has begun and is not ready."""
        job_ids = (job_id for work in device.works for job_id in work.job_ids)
        return any(self._keeps_group(job_id, device.device_id) for job_id in job_ids)

    def _keeps_group(self, job_id: int, device_id: int) -> bool:
        job = self.view.job(job_id)
        if job is None or device_id not in job.last_devices:
            return False
        if job_id not in self._keeps:
            task = self.reader.read(job)
            self._keeps[job_id] = task is not None and not self._is_ready(task) and self._has_begun(task)
        return self._keeps[job_id]

    def _has_begun(self, task: Task) -> bool:
        if task.num_steps >= task.job.request.steps:
            return False
        return not task.num_steps or len(task.job.last_devices) in [speed.degree for speed in task.group_speeds]

    def _own_group(self, task: Task) -> Group:
        """Return the devices that a task goes on with: all for steps, some for a decode; none if they are not for it.

        Nor does it go on with devices that cannot form a group now.
        """
        group = task.job.last_devices
        role = self._role(task.job, task.job.left)
        if len({device.pool for one in group if (device := self.view.device(one)) is not None}) > 1:
            return ()
        if task.num_steps:
            return group
        if role is None or not self._holds_next(task, group, task.job.left):
            return ()
        widths = [width for width, _ in self._pieces((task,), role, len(group))]
        return group[: max(widths)] if self.is_stage_aware else group

    def _holds_next(self, task: Task, group: Group, left: Cursor) -> bool:
        request = task.job.request
        role = self._role(task.job, left)
        fits = self.profiles.of(request, self.costs).fits
        return role is not None and self.layout.holds(group, request.pipeline, role, fits)

    def _role_of(self, task: Task, stage: Stage) -> Role | None:
        return role_of(self.costs.graph(task.job.request.pipeline), stage)

    def _role(self, job: JobView, left: Cursor) -> Role | None:
        return None if left.stage is None else role_of(self.costs.graph(job.request.pipeline), left.stage)

    def after(self, tasks: Sequence[Task]) -> list[Task]:
        """Queue stages beside the steps on the auxiliaries that are free first; returns the other tasks.

        Where there are none, or all are kept by requests that began before they were auxiliaries, it is to be
        dispatched like steps, on primaries; a task that must wait for its auxiliary is not returned.
        """
        others = []
        roles: dict[Cursor, Role | None] = {}  # Many requests, few cursors.
        for task in tasks:
            if task.job.left not in roles:
                roles[task.job.left] = self._only_role(task)
            role = roles[task.job.left]
            if role is None or role is Role.D or not self._width(task, role):
                others.append(task)
                continue
            launch = self._launch((task,), f"is next for devices with {role}")
            self._queue((task,), role, launch)
            self.starts += self._ordered(launch)
        return others

    def _only_role(self, task: Task) -> Role | None:
        """Return the role of all stages that are left; None if they have several, or one is on a CPU slot."""
        roles = {self._role_of(task, stage) for stage, _ in task.job.left.pieces}
        return roles.pop() if len(roles) == 1 else None

    def place(self, bid: Bid, way: Way, why: str) -> bool:
        """Dispatch a bid, if its devices are open and its encode finds an auxiliary; `why` it, in words."""
        task = bid.tasks[0]
        group = self.devices.take(way.pool, way.degree, task.job.last_devices)
        if group is None:
            return False
        launch = self._launch(bid.tasks, f"is dispatched on {self._where(way)}, {why}")
        if launch.role is Role.E and Role.E not in way.pool.kind.roles:
            if self._auxiliary_group(task, Role.E) is None:
                self.devices.give(group)
                return False
            self._note_encode(bid.tasks)
            launch.skip(Role.E)
        pieces = [piece for role in way.pool.kind.roles for piece in self._pieces(bid.tasks, role, way.degree)]
        own_ns, busy_ns = sum(one_ns for _, one_ns in pieces), sum(width * one_ns for width, one_ns in pieces)
        self.runs.append(PoolRun(way.pool, self.now_ns, self.now_ns + own_ns, busy_ns, len(bid.tasks)))
        self._start(task, group, launch)
        return True

    def _note_encode(self, tasks: Sequence[Task]) -> None:
        """Have tasks encoded on auxiliaries, with others that begin now."""
        for task in tasks:
            stages = tuple(stage for stage, _ in task.job.left.pieces if self._role_of(task, stage) is Role.E)
            shape = task.job.request.shape if any(stage.spec.one_shape for stage in stages) else None
            key = stages, shape, None if task.job.may_share else task.job.job_id
            self._encodes.setdefault(key, []).append(task)

    def queue_encodes(self) -> None:
        """Queue the encodes of what was placed on primaries without E, in batches of the optimal size, as first starts.

        Source: TridentServe appendix E.1: E plans that run on auxiliaries alone are merged up to E's optimum.
        """
        others, self.starts = self.starts, []
        for (stages, _, _), tasks in self._encodes.items():
            most = 1
            if self.batches and self._width(tasks[0], Role.E) == 1:
                most = min(self._optimal_batch(task, stage) for task in tasks for stage in stages)
            for some in parts_of(tasks, most):
                launch = self._launch(some, "is encoded beside its steps")
                is_queued = self._queue(some, Role.E, launch)
                assert is_queued, "a primary was given to a request whose encode has no auxiliary"
                self.starts += self._ordered(launch)
        self.starts += others

    def _where(self, way: Way) -> str:
        text = devices_text(way.degree)
        return text if self.layout.is_colocated else f"{text} for {way.pool.kind}"

    def _optimal_batch(self, task: Task, stage: Stage) -> int:
        return optimal_batch(stage, task.job.request, self.costs, self._profile(task).footprint.room_bytes)

    def _launch(self, tasks: Sequence[Task], what: str) -> Launch:
        """Return the launch of tasks; `what` says in words what happens to them."""
        job = tasks[0].job
        num_others = len(tasks) - 1
        why = f"{what}, in one batch with {num_others} more" if num_others else explain(job, what, self.now_ns)
        ids = tuple([task.job.job_id for task in tasks])
        room_bytes = self._profile(tasks[0]).footprint.room_bytes
        return Launch(ids, job.request, job.left, self.costs, why, room_bytes)

    def _start(self, task: Task, group: Group, launch: Launch) -> None:
        """Start all up to a chunk of steps; and all after the steps, if these are the last and the group is for it."""
        if launch.role is Role.E:
            launch.run(Role.E, group)
        if launch.role is Role.D:
            launch.run(Role.D, group, chunk_ns=self.chunk_ns)
        if launch.role is Role.D:
            self.devices.keep(group)
        elif launch.role is Role.C and self._holds_next(task, group, launch.left):
            launch.run(Role.C, group, None if self.is_stage_aware else len(group))
        self.starts += self._ordered(launch)

    def _queue(self, tasks: Sequence[Task], role: Role, launch: Launch) -> bool:
        """Start the stages of a role on the auxiliaries that are free first; returns whether there were enough."""
        task = tasks[0]
        group = self._auxiliary_group(task, role)
        if group is None:
            return False
        width = len(group)
        run_ns = sum(one_ns for _, one_ns in self._pieces(tasks, role, width))
        end_ns = self.devices.queue(group, task.ready_ns, run_ns)
        self.runs.append(PoolRun(self._auxiliary(task, role), end_ns - run_ns, end_ns, run_ns * width, len(tasks)))
        launch.run(role, group, None if self.is_stage_aware else width)
        return True

    def _auxiliary_group(self, task: Task, role: Role) -> Group | None:
        """Return the auxiliaries for a role that are free first; None if there are not enough."""
        width = self._width(task, role)
        return self.devices.earliest(self._auxiliary(task, role), width, self._is_kept) if width else None

    def _auxiliary(self, task: Task, role: Role) -> Pool:
        return Pool(self.layout.part_of(task.job.request.pipeline), PlacementType(role.value))

    def _width(self, task: Task, role: Role) -> int:
        """Return the widest degree up to the optimal one at which a role fits on auxiliaries of a node; 0 if none.

        Without awareness of stages, a decode gets as many as the steps had, or as many as a node has.
        """
        pool = self._auxiliary(task, role)
        wide = self.layout.widest(pool)
        fits = self._profile(task).fits.get(pool.kind, ())
        width = max([degree for degree in fits if degree <= wide], default=0)
        if width and role is Role.C and not self.is_stage_aware:
            return max(width, min(wide, len(task.job.last_devices)))
        return width

    def _profile(self, task: Task) -> ClassProfile:
        return self.profiles.of(task.job.request, self.costs)

    def _pieces(self, tasks: Sequence[Task], role: Role, degree: int) -> list[tuple[int, int]]:
        """Return the degree and time of each remaining stage of a role on a group of this width; of a batch, on 1."""
        task = tasks[0]
        request = task.job.request
        found = []
        for stage, num_steps in task.job.left.pieces:
            if self._role_of(task, stage) is not role:
                continue
            if len(tasks) > 1:
                room_bytes = self._profile(task).footprint.room_bytes
                found.append((1, num_steps * batch_ns(stage, request, len(tasks), self.costs, room_bytes)))
                continue
            own = degree if stage.has_steps else optimal_degree(stage, request, self.costs, degree)
            found.append((own, self.costs.work_ns(stage, (request,), own, num_steps)))
        return found

    def _ordered(self, launch: Launch) -> list[Start]:
        """Return the starts, with what their devices drop first."""
        if self.layout.is_colocated:
            return launch.starts
        return [
            replace(start, drop_order=self.layout.drop_order(start.devices[0], self.costs)) for start in launch.starts
        ]
