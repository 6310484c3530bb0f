"""One round of TetriServe: which jobs run in it, at which degree, on which devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.core.work import Group, Start
from tilework.cost.demand import Segment, Speed, min_device_allocation
from tilework.policy.published.tetriserve.round_length import whole_steps
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.knapsack import Option, solve_knapsack
from tilework.policy.toolkit.open_devices import is_open
from tilework.policy.toolkit.starts import before_steps, explain, start_at_once, start_steps
from tilework.policy.toolkit.tasks import NO_STEPS, Task


@dataclass(slots=True, eq=False)
class Round:
    """A round from `now_ns` on; its last `margin_ns` are left free."""

    now_ns: int
    round_ns: int
    margin_ns: int
    end_ns: int = field(init=False)
    limit_ns: int = field(init=False)
    _in_rounds: dict[tuple[Speed, ...], tuple[Speed, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.end_ns = self.now_ns + self.round_ns
        self.limit_ns = self.end_ns - self.margin_ns

    def minimal_allocation(self, task: Task) -> tuple[Segment, ...]:
        """Return the cheapest degrees that meet the deadline, by times of steps in rounds, else by their own times."""
        budget_ns = task.due_ns - self.now_ns - task.head_ns - task.tail_ns
        in_rounds = self._in_rounds.get(task.speeds)
        if in_rounds is None:
            in_rounds = self._in_rounds[task.speeds] = whole_steps(task.speeds, self.round_ns, self.margin_ns)
        return min_device_allocation(in_rounds, task.num_steps, budget_ns) or min_device_allocation(
            task.speeds, task.num_steps, budget_ns
        )

    def num_steps(self, task: Task, speed: Speed, start_ns: int) -> int:
        """Return the steps of a task in this round, from `start_ns` on; one if a step is longer than a round."""
        room_ns = self.limit_ns - start_ns - task.head_ns
        num_steps = min(task.num_steps, max(0, room_ns) // max(1, speed.step_ns))
        is_long = speed.step_ns > self.round_ns - self.margin_ns
        return max(1, num_steps) if is_long else num_steps

    def can_wait(self, task: Task) -> bool:
        """Return whether a task can be on time even if it does not run in this round."""
        return self.end_ns + task.head_ns + self.later_ns(task, task.num_steps) <= task.due_ns

    def saves(self, task: Task, speed: Speed) -> bool:
        """Return whether a task can be on time if it runs at this speed in this round."""
        num_steps = self.num_steps(task, speed, task.ready_ns)
        run_end_ns = task.ready_ns + task.head_ns + num_steps * speed.step_ns
        return self.final_ns(task, run_end_ns, task.num_steps - num_steps) <= task.due_ns

    def final_ns(self, task: Task, run_end_ns: int, num_steps_left: int) -> int:
        """Return when a task ends at the earliest if its works in this round end then and leave this many steps."""
        begin_ns = max(run_end_ns, self.end_ns) if num_steps_left else run_end_ns
        return begin_ns + self.later_ns(task, num_steps_left)

    def later_ns(self, task: Task, num_steps: int) -> int:
        """Return the least time that steps and decode take after this round, whole rounds but for the last."""
        if not num_steps:
            return task.tail_ns
        step_ns = task.fastest.step_ns
        per_round = max(1, (self.round_ns - self.margin_ns) // max(1, step_ns))
        num_rounds = (num_steps - 1) // per_round
        last_ns = (num_steps - num_rounds * per_round) * step_ns
        return num_rounds * max(self.round_ns, step_ns) + last_ns + task.tail_ns


_LEAST_SAVING = 0.1  # Share of a step's time: with less, requests that come later lose more than these gain.


@dataclass(slots=True, eq=False)
class RoundBatch:
    """Tasks that share forward passes from `ready_ns` on, by steps that end before `limit_ns`.

    Their encodes come first, one by one. `parts` are the steps, each with the tasks that make them: a task whose last
    step is made is decoded, and the others continue. `ends_ns` is when a task ends here, and `num_steps_left` how many
    of its steps remain then.

    Source: TetriServe §5, selective continuous batching.
    """

    tasks: Sequence[Task]
    ready_ns: int
    limit_ns: int
    costs: CostModel
    parts: list[tuple[Sequence[Task], int]] = field(default_factory=list, init=False)
    num_steps_left: dict[int, int] = field(init=False)
    ends_ns: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        members = list(self.tasks)
        left = {task.job.job_id: task.job.left.num_steps for task in self.tasks}
        now = max([self.ready_ns, *(task.ready_ns for task in members)]) + sum(task.head_ns for task in members)
        self.num_steps_left = left
        self.ends_ns = dict.fromkeys(left, now)
        while members:
            step_ns = step_together_ns(members, self.costs)
            least = min(left[task.job.job_id] for task in members)
            num_steps = min(least, (self.limit_ns - now) // max(1, step_ns))
            if num_steps <= 0:
                return
            self.parts.append((members, num_steps))
            now += num_steps * step_ns
            for task in members:
                left[task.job.job_id] -= num_steps
                now += 0 if left[task.job.job_id] else task.tail_ns
                self.ends_ns[task.job.job_id] = now
            members = [task for task in members if left[task.job.job_id]]

    def starts(self, device_id: int, why: str) -> Iterator[Start]:
        left: dict[int, Cursor] = {}
        for task in self.tasks:
            left[task.job.job_id] = before_steps(task.job.left)
            yield from start_at_once(task.job.left, task.job.job_id, device_id, why)
        for members, num_steps in self.parts:
            stage = left[members[0].job.job_id].stage
            job_ids = tuple(task.job.job_id for task in members)
            assert stage is not None
            yield start_steps(stage, job_ids, (device_id,), num_steps, why)
            for job_id in job_ids:
                left[job_id] = left[job_id].advanced(num_steps)
                yield from start_at_once(left[job_id], job_id, device_id, why)


def may_share(tasks: Sequence[Task], task: Task, costs: CostModel) -> bool:
    """Return whether a task fits into memory with these, which are of its shape, and a step together saves a tenth.

    Raises UnknownCost.
    """
    joined = [*tasks, task]
    request = task.job.request
    stage = task.job.left.stepped
    if stage is None or not stage.spec.batchable:
        return False
    if not all(each.job.may_share and each.job.left.stepped == stage for each in joined):
        return False
    if not costs.fits_together(stage, [request.shape] * len(joined)):
        return False
    apart_ns = step_together_ns(tasks, costs) + step_together_ns([task], costs)
    return step_together_ns(joined, costs) <= (1.0 - _LEAST_SAVING) * apart_ns


def step_together_ns(tasks: Sequence[Task], costs: CostModel) -> int:
    """Return the time of a step of these tasks together on one device. Raises UnknownCost."""
    stage = tasks[0].job.left.stepped
    assert stage is not None
    return costs.work_ns(stage, [task.job.request for task in tasks], 1)


@dataclass(slots=True, eq=False)
class RoundTask:
    """A task in a round. `speeds` are those at which it makes progress in it; `parts` is its minimal allocation.

    `guests` are the tasks that make their steps with its own, in one batch on its one device.
    """

    task: Task
    speeds: dict[int, Speed]
    parts: tuple[Segment, ...]
    group: Group = ()
    why: str = ""
    guests: list[Task] = field(default_factory=list)

    @staticmethod
    def of(task: Task, this_round: Round) -> RoundTask | None:
        """Return the entry of a task; None if it can make no progress.

        It then still runs, on devices that take no part in the round.
        """
        if task.ready_ns > this_round.now_ns + this_round.margin_ns:
            return None
        parts = this_round.minimal_allocation(task)
        useful = {speed.degree: speed for speed in task.speeds if this_round.num_steps(task, speed, task.ready_ns)}
        preferred = parts[0].degree if parts else min(useful, default=1)
        is_only_decode = not task.num_steps
        has_no_room_after_encode = task.head_ns > 0 and preferred not in useful
        if is_only_decode or (has_no_room_after_encode and (this_round.can_wait(task) or not useful)):
            return RoundTask(task, {1: NO_STEPS}, (Segment(0, 1),))
        return RoundTask(task, useful, parts) if useful else None

    @property
    def degree(self) -> int:
        return len(self.group)

    @property
    def makes_steps_alone(self) -> bool:
        """True if it makes steps on one device, and not only its encode or decode."""
        return self.speeds.get(1, NO_STEPS) is not NO_STEPS

    @property
    def batch(self) -> list[Task]:
        return [self.task, *self.guests]

    def cheapest_degrees(self) -> list[int]:
        """Return the degrees of the minimal allocation at which it makes progress."""
        return [part.degree for part in self.parts if part.degree in self.speeds]

    def degrees_to_try(self) -> list[int]:
        """Return the cheapest degrees; then narrower ones, which are better than none."""
        degrees = self.cheapest_degrees() or [min(self.speeds)]
        return degrees + [degree for degree in reversed(self.speeds) if degree < min(degrees)]

    def reason(self, this_round: Round) -> str:
        """Return why it runs, and when it would finish at the next lower degree, or if it waited for the next round."""
        task = self.task
        degree = self.degree
        text = explain(task.job, self.why, this_round.now_ns)
        if task.job.request.deadline_ns is None or task.job.dropped_to_best_effort or not task.num_steps:
            return text
        below = next((speed for speed in reversed(task.speeds) if speed.degree < degree), None)
        if below is None:
            start_ns, step_ns, instead = this_round.end_ns, task.fastest.step_ns, "if it waited a round, it"
        else:
            start_ns, step_ns, instead = task.ready_ns, below.step_ns, f"with {below.degree} it"
        finish_ns = start_ns + task.head_ns + task.num_steps * step_ns + task.tail_ns
        spare_s = s_from_ns(task.due_ns - finish_ns)
        return f"{text}; {instead} would finish {abs(spare_s):.2f} s {'late' if spare_s < 0 else 'early'}"


class RoundPlan:
    """The plan of one round, made in this order (TetriServe §4.2):

    1. for each task the cheapest degrees that meet its deadline (`Round.minimal_allocation`);
    2. a knapsack chooses the tasks to run so that the most tasks can still be on time after the round. A task that can
       be on time even if it does not run needs no room yet. One that is past its patience (see `DeadlineOrder`) goes
       before all others;
    3. remaining devices go to the other tasks, by urgency, at the cheapest of their degrees for which there is room;
    4. devices that still remain go to the tasks whose remaining steps they shorten most, per device;
    5. a task without room makes its steps together with one of the same shape that has a device to itself, if a batch
       saves a tenth of the time and no member is late by that (§5, selective continuous batching);
    6. groups are chosen so that tasks stay on their devices where possible.

    A device takes part if it is free when the round begins, or nearly so.

    Departures from the paper:

    - Steps 3 and 4 repeat until no task can use another device; without that its figures are out of reach.
    - A task that ends within the round counts with its own end.
    - The steps after the round are taken to run in whole rounds.
    - A degree at which a step is longer than a round is not ruled out, but held to cost all the rounds through which it
      keeps its devices.
    """

    def __init__(self, view: ClusterView, costs: CostModel, tasks: Sequence[Task], this_round: Round) -> None:
        """`tasks`: in order of urgency."""
        self._costs = costs
        self._round = this_round
        self._free_ns = {device.device_id: device.free_ns for device in view.devices}
        self._nodes = nodes(
            device for device in view.devices if is_open(device, this_round.now_ns, lead_ns=this_round.margin_ns)
        )
        self._allocator = Allocator(self._nodes)
        self._entries = [entry for task in tasks if (entry := RoundTask.of(task, this_round)) is not None]

    def starts(self) -> tuple[Start, ...]:
        self._run_urgent()
        self._fill()
        self._widen()
        self._share()
        running = [entry for entry in self._entries if entry.group]
        self._choose_groups(running)
        return tuple(start for entry in running for start in self._starts(entry))

    # 2. The tasks that must run.

    def _run_urgent(self) -> None:
        capacity = self._allocator.num_free()
        options = [self._options(entry, capacity) for entry in self._entries]
        chosen = [
            (entry, of_entry[index].width)
            for entry, of_entry, index in zip(self._entries, options, solve_knapsack(options, capacity), strict=True)
            if index is not None
        ]
        chosen.sort(key=lambda choice: -choice[1])  # Wide ones first: narrow ones find room beside them.
        for entry, width in chosen:
            self._take(entry, width, "must run now")

    def _options(self, entry: RoundTask, capacity: int) -> list[Option]:
        """Return the degrees whose choice keeps a task from being late; none if it need not run, or it is of no use."""
        task = entry.task
        if self._round.can_wait(task):
            return []
        if task.earliest_ns > task.due_ns:
            return [Option(min(entry.speeds), capacity + 1)]
        degrees = entry.cheapest_degrees()
        saving = [degree for degree in degrees if self._round.saves(task, entry.speeds[degree])]
        if not saving:
            others = (speed for degree, speed in entry.speeds.items() if degree not in degrees)
            saving = [speed.degree for speed in others if self._round.saves(task, speed)][:1]
        return [Option(degree, 1) for degree in saving]

    # 3. The tasks that may run.

    def _fill(self) -> None:
        for entry in self._entries:
            if not entry.group and self._allocator.num_free():
                for degree in entry.degrees_to_try():
                    if self._take(entry, degree, "finds room"):
                        break

    def _take(self, entry: RoundTask, width: int, why: str) -> bool:
        entry.group = self._allocator.take(width, entry.task.job.last_devices) or ()
        entry.why = why
        return bool(entry.group)

    # 4. The tasks that gain by more devices.

    def _widen(self) -> None:
        """Widen, again and again, the task that gains most per further device; ties by urgency, on-time ones first."""
        heap = [gain for index in range(len(self._entries)) for gain in self._gains(index)]
        heapify(heap)
        while heap and self._allocator.num_free():
            _, _, index, degree = heappop(heap)
            entry = self._entries[index]
            if degree - entry.degree > self._allocator.num_free():
                continue
            if wider := self._allocator.exchange(entry.group, degree, entry.group):
                entry.group = wider
                for gain in self._gains(index):
                    heappush(heap, gain)

    def _gains(self, index: int) -> Iterator[tuple[bool, float, int, int]]:
        entry = self._entries[index]
        if not entry.group:
            return
        step_ns = entry.speeds[entry.degree].step_ns
        for degree, speed in entry.speeds.items():
            if degree > entry.degree and speed.step_ns < step_ns:
                saved_ns = entry.task.num_steps * (step_ns - speed.step_ns)
                yield entry.task.job.dropped_to_best_effort, -saved_ns / (degree - entry.degree), index, degree

    # 5. The tasks that share a device.

    def _share(self) -> None:
        """Let tasks without room join running ones, by urgency; if possible one with which they made steps before."""
        hosts: dict[tuple[str, Shape], list[RoundTask]] = {}
        for entry in self._entries:
            if entry.degree == 1 and entry.makes_steps_alone:
                hosts.setdefault(_batch_key(entry.task), []).append(entry)
        for entry in self._entries:
            if not entry.group and entry.makes_steps_alone:
                here = entry.task.job.last_devices
                candidates = hosts.get(_batch_key(entry.task), ())
                for host in sorted(candidates, key=lambda host: host.task.job.last_devices != here):
                    if self._may_join(entry.task, host):
                        host.guests.append(entry.task)
                        break

    def _may_join(self, task: Task, host: RoundTask) -> bool:
        takes_time = task.job.dropped_to_best_effort and not host.task.job.dropped_to_best_effort
        if takes_time or not may_share(host.batch, task, self._costs):
            return False
        batch = self._batch([*host.batch, task], self._round.now_ns)
        return bool(batch.parts) and all(self._is_on_time_in(batch, each) for each in batch.tasks)

    def _batch(self, tasks: Sequence[Task], ready_ns: int) -> RoundBatch:
        return RoundBatch(tasks, ready_ns, self._round.limit_ns, self._costs)

    def _is_on_time_in(self, batch: RoundBatch, task: Task) -> bool:
        """Return whether a task that could be on time still can after this round in a batch."""
        end_ns, num_steps_left = batch.ends_ns[task.job.job_id], batch.num_steps_left[task.job.job_id]
        if num_steps_left:
            end_ns = self._round.final_ns(task, end_ns, num_steps_left)
        return end_ns <= task.due_ns or task.earliest_ns > task.due_ns

    # 6. The groups.

    def _choose_groups(self, running: Iterable[RoundTask]) -> None:
        """Choose the groups once more, now that all widths are known: tasks that can stay on theirs come first."""
        allocator = Allocator(self._nodes)
        order = sorted(running, key=lambda entry: (entry.degree != len(entry.task.job.last_devices), -entry.degree))
        groups = [allocator.take(entry.degree, entry.task.job.last_devices) for entry in order]
        if all(groups):  # Else, over several nodes, those that stay leave no room for a wide one.
            for entry, group in zip(order, groups, strict=True):
                entry.group = group or ()

    def _starts(self, entry: RoundTask) -> Iterator[Start]:
        task = entry.task
        why = entry.reason(self._round)
        start_ns = max([task.ready_ns, *(self._free_ns[device_id] for device_id in entry.group)])
        if entry.guests:
            why = f"{why}; {len(entry.guests)} without room of their own make steps with it"
            yield from self._batch(entry.batch, start_ns).starts(entry.group[0], why)
            return
        speed = entry.speeds[entry.degree]
        num_steps = 0 if speed is NO_STEPS else self._round.num_steps(task, speed, start_ns)
        if num_steps or speed is NO_STEPS:
            yield from task.starts(entry.group, num_steps, why)


def _batch_key(task: Task) -> tuple[str, Shape]:
    """Return the key of tasks that may share; coarser than `step_key`: guidance and previews may differ in a batch."""
    return task.job.request.pipeline, task.job.request.shape
