"""One round of TetriServe: who runs in it, at which degree, on which GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.core.work import Group, Start
from tilework.policy.published.tetriserve.round_batch import RoundBatch, may_share
from tilework.policy.published.tetriserve.rounds import whole_steps
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.demand import Segment, Speed, min_device_allocation
from tilework.policy.toolkit.knapsack import Option, pack
from tilework.policy.toolkit.order import explain
from tilework.policy.toolkit.tasks import Task

_NO_STEPS = Speed(1, 0)


@dataclass(slots=True, eq=False)
class Entry:
    """A task in a round. `speeds` are those at which it makes progress in it; `parts` its minimal allocation.

    `guests` are the tasks that make their steps with its own, in one batch on its one device.
    """

    task: Task
    speeds: dict[int, Speed]
    parts: tuple[Segment, ...]
    group: Group = ()
    why: str = ""
    guests: list[Task] = field(default_factory=list)

    @property
    def degree(self) -> int:
        return len(self.group)

    @property
    def everybody(self) -> list[Task]:
        return [self.task, *self.guests]


class RoundPlan:
    """The plan of one round, made in this order (TetriServe §4.2):

    1. for each task the cheapest degrees that meet its deadline (`min_device_allocation`);
    2. a knapsack chooses whom to run so that the most tasks can still be on time after the round. A task that can even
       if it does not run needs no room yet. One that is past its patience (see `DeadlineOrder`) goes before all others;
    3. what is left goes to the others, by urgency, at the cheapest of their degrees for which there is room;
    4. what is still left goes to those whose remaining steps it shortens most, per GPU;
    5. who has found no room makes its steps together with one of the same shape that has a GPU to itself, if a batch
       saves a tenth of the time and nobody in it is late by that (§5, selective continuous batching);
    6. groups are chosen so that tasks stay on their GPUs where possible.

    A GPU takes part if it is free when the round begins, or nearly so. Departures from the paper: steps 3 and 4 go on
    until nobody can use a GPU more, without which its figures are out of reach; a task that ends within the round is
    judged by its own end; the steps after the round are taken to run in whole rounds; a degree at which a step is
    longer than a round is not ruled out, but held to cost all the rounds through which it keeps its GPUs.
    """

    def __init__(
        self, view: ClusterView, costs: CostModel, tasks: Sequence[Task], now_ns: int, round_ns: int, margin_ns: int
    ) -> None:
        """`tasks`: in order of urgency."""
        self._costs = costs
        self._now_ns, self._round_ns, self._margin_ns = now_ns, round_ns, margin_ns
        self._end_ns = now_ns + round_ns
        self._free_ns = {device.device_id: device.free_ns for device in view.devices}
        self._nodes = nodes(device for device in view.devices if self._takes_part(device.free_ns, len(device.works)))
        self._allocator = Allocator(self._nodes)
        self._in_rounds: dict[tuple[Speed, ...], tuple[Speed, ...]] = {}
        self._entries = [entry for task in tasks if (entry := self._entry(task)) is not None]

    def starts(self) -> tuple[Start, ...]:
        self._run_the_urgent()
        self._fill()
        self._widen()
        self._share()
        running = [entry for entry in self._entries if entry.group]
        self._settle(running)
        return tuple(start for entry in running for start in self._starts(entry))

    def _takes_part(self, free_ns: int, num_works: int) -> bool:
        """At most one work of the former round may still be under way: with those of this round, three wait."""
        return free_ns <= self._now_ns + self._margin_ns and num_works < 2

    # 1. What each task needs.

    def _entry(self, task: Task) -> Entry | None:
        """None if the task can make no progress: it still runs, on GPUs that take no part."""
        if task.ready_ns > self._now_ns + self._margin_ns:
            return None
        parts = self._parts(task)
        useful = {speed.degree: speed for speed in task.speeds if self._num_steps(task, speed, task.ready_ns)}
        preferred = parts[0].degree if parts else min(useful, default=1)
        is_only_decode = not task.num_steps
        has_no_room_after_encode = task.encode_ns > 0 and preferred not in useful
        if is_only_decode or (has_no_room_after_encode and (self._can_wait(task) or not useful)):
            return Entry(task, {1: _NO_STEPS}, (Segment(0, 1),))
        return Entry(task, useful, parts) if useful else None

    def _parts(self, task: Task) -> tuple[Segment, ...]:
        """The minimal allocation: by what steps cost in rounds, or, if that is too slow, by what they take."""
        budget_ns = task.due_ns - self._now_ns - task.encode_ns - task.decode_ns
        in_rounds = self._in_rounds.get(task.speeds)
        if in_rounds is None:
            in_rounds = self._in_rounds[task.speeds] = whole_steps(task.speeds, self._round_ns, self._margin_ns)
        return min_device_allocation(in_rounds, task.num_steps, budget_ns) or min_device_allocation(
            task.speeds, task.num_steps, budget_ns
        )

    def _can_wait(self, task: Task) -> bool:
        """Whether it can be on time even if it does not run in this round."""
        return self._end_ns + task.encode_ns + self._rest_ns(task, task.num_steps) <= task.due_ns

    def _num_steps(self, task: Task, speed: Speed, start_ns: int) -> int:
        """Steps that a task runs in this round, from `start_ns` on; one if a step is longer than a round."""
        room_ns = self._end_ns - self._margin_ns - start_ns - task.encode_ns
        num_steps = min(task.num_steps, max(0, room_ns) // max(1, speed.step_ns))
        is_long = speed.step_ns > self._round_ns - self._margin_ns
        return max(1, num_steps) if is_long else num_steps

    # 2. Whom to run.

    def _run_the_urgent(self) -> None:
        capacity = self._allocator.num_free()
        options = [self._options(entry, capacity) for entry in self._entries]
        chosen = [
            (entry, of_entry[index].width)
            for entry, of_entry, index in zip(self._entries, options, pack(options, capacity), strict=True)
            if index is not None
        ]
        chosen.sort(key=lambda choice: -choice[1])  # Wide ones first: narrow ones find room in what they leave.
        for entry, width in chosen:
            self._take(entry, width, "must run now")

    def _options(self, entry: Entry, capacity: int) -> list[Option]:
        """The degrees whose choice keeps a task from being late; none if it need not run, or it is of no use."""
        task = entry.task
        if self._can_wait(task):
            return []
        if task.earliest_ns > task.due_ns:
            return [Option(min(entry.speeds), capacity + 1)]
        degrees = [part.degree for part in entry.parts if part.degree in entry.speeds]
        saving = [degree for degree in degrees if self._saves(entry, degree)]
        if not saving:
            saving = [degree for degree in entry.speeds if degree not in degrees and self._saves(entry, degree)][:1]
        return [Option(degree, 1) for degree in saving]

    def _saves(self, entry: Entry, degree: int) -> bool:
        task, speed = entry.task, entry.speeds[degree]
        num_steps = self._num_steps(task, speed, task.ready_ns)
        run_end_ns = task.ready_ns + task.encode_ns + num_steps * speed.step_ns
        if num_steps < task.num_steps:
            run_end_ns = max(run_end_ns, self._end_ns)
        return run_end_ns + self._rest_ns(task, task.num_steps - num_steps) <= task.due_ns

    def _rest_ns(self, task: Task, num_steps: int) -> int:
        """The least time that steps and decode take after this round, whole rounds but for the last."""
        if not num_steps:
            return task.decode_ns
        step_ns = task.fastest.step_ns
        per_round = max(1, (self._round_ns - self._margin_ns) // max(1, step_ns))
        num_rounds = (num_steps - 1) // per_round
        last_ns = (num_steps - num_rounds * per_round) * step_ns
        return num_rounds * max(self._round_ns, step_ns) + last_ns + task.decode_ns

    # 3. Who else may run.

    def _fill(self) -> None:
        for entry in self._entries:
            if not entry.group and self._allocator.num_free():
                for degree in _degrees_to_try(entry):
                    if self._take(entry, degree, "finds room"):
                        break

    def _take(self, entry: Entry, width: int, why: str) -> bool:
        entry.group = self._allocator.take(width, entry.task.job.last_devices) or ()
        entry.why = why
        return bool(entry.group)

    # 4. Who gains by more.

    def _widen(self) -> None:
        """Each time the task that gains most per further GPU gets them; ties by urgency, on-time ones first."""
        heap = [gain for index in range(len(self._entries)) for gain in self._gains(index)]
        heapify(heap)
        while heap and self._allocator.num_free():
            _, _, index, degree = heappop(heap)
            entry = self._entries[index]
            if degree - entry.degree <= self._allocator.num_free() and self._exchange(entry, degree):
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

    def _exchange(self, entry: Entry, degree: int) -> bool:
        """Trade a group for a wider one, if there is room."""
        former = entry.group
        self._allocator.give(former)
        wider = self._allocator.take(degree, former)
        entry.group = wider or self._allocator.take(len(former), former) or ()
        return wider is not None

    # 5. Who shares.

    def _share(self) -> None:
        """Those without room join those who run, by urgency; if they can, the one with whom they made steps before."""
        hosts: dict[tuple[str, Shape], list[Entry]] = {}
        for entry in self._entries:
            if entry.degree == 1 and _makes_steps(entry):
                hosts.setdefault(_kind(entry.task), []).append(entry)
        for entry in self._entries:
            if not entry.group and _makes_steps(entry):
                here = entry.task.job.last_devices
                for host in sorted(
                    hosts.get(_kind(entry.task), ()), key=lambda host: host.task.job.last_devices != here
                ):
                    if self._is_welcome(entry.task, host):
                        host.guests.append(entry.task)
                        break

    def _is_welcome(self, task: Task, host: Entry) -> bool:
        takes_time = task.job.dropped_to_best_effort and not host.task.job.dropped_to_best_effort
        if takes_time or not may_share(host.everybody, task, self._costs):
            return False
        batch = self._batch([*host.everybody, task], self._now_ns)
        return bool(batch.parts) and all(self._is_on_time_in(batch, each) for each in batch.tasks)

    def _batch(self, tasks: Sequence[Task], ready_ns: int) -> RoundBatch:
        return RoundBatch(tasks, ready_ns, self._end_ns - self._margin_ns, self._costs)

    def _is_on_time_in(self, batch: RoundBatch, task: Task) -> bool:
        """Whether a task that could be on time still can after this round in a batch."""
        end_ns, left = batch.ends_ns[task.job.job_id], batch.left[task.job.job_id]
        if left:
            end_ns = max(end_ns, self._end_ns) + self._rest_ns(task, left)
        return end_ns <= task.due_ns or task.earliest_ns > task.due_ns

    # 6. Where.

    def _settle(self, running: Iterable[Entry]) -> None:
        """Choose the groups once more, now that all widths are known: those that can stay where they are come first."""
        allocator = Allocator(self._nodes)
        order = sorted(running, key=lambda entry: (entry.degree != len(entry.task.job.last_devices), -entry.degree))
        groups = [allocator.take(entry.degree, entry.task.job.last_devices) for entry in order]
        if all(groups):  # Else, over several nodes, those that stay leave no room for a wide one.
            for entry, group in zip(order, groups, strict=True):
                entry.group = group or ()

    def _starts(self, entry: Entry) -> Iterator[Start]:
        task = entry.task
        start_ns = max([task.ready_ns, *(self._free_ns[device_id] for device_id in entry.group)])
        if entry.guests:
            why = f"{self._reason(entry)}; {len(entry.guests)} without room of their own make steps with it"
            yield from self._batch(entry.everybody, start_ns).starts(entry.group[0], why)
            return
        speed = entry.speeds[entry.degree]
        num_steps = 0 if speed is _NO_STEPS else self._num_steps(task, speed, start_ns)
        if num_steps or speed is _NO_STEPS:
            yield from task.starts(entry.group, num_steps, self._reason(entry))

    def _reason(self, entry: Entry) -> str:
        """Why it runs, and what would come of a degree below, or of waiting for the next round."""
        task, degree = entry.task, entry.degree
        text = explain(task.job, entry.why, self._now_ns)
        if task.job.request.deadline_ns is None or task.job.dropped_to_best_effort or not task.num_steps:
            return text
        below = next((speed for speed in reversed(task.speeds) if speed.degree < degree), None)
        if below is None:
            start_ns, step_ns, instead = self._end_ns, task.fastest.step_ns, "if it waited a round, it"
        else:
            start_ns, step_ns, instead = task.ready_ns, below.step_ns, f"with {below.degree} it"
        finish_ns = start_ns + task.encode_ns + task.num_steps * step_ns + task.decode_ns
        spare_s = s_from_ns(task.due_ns - finish_ns)
        return f"{text}; {instead} would finish {abs(spare_s):.2f} s {'late' if spare_s < 0 else 'early'}"


def _kind(task: Task) -> tuple[str, Shape]:
    return task.job.request.pipeline, task.job.request.shape


def _makes_steps(entry: Entry) -> bool:
    """Whether it makes progress on one device, by more than a decode or an encode alone."""
    return entry.speeds.get(1, _NO_STEPS) is not _NO_STEPS


def _degrees_to_try(entry: Entry) -> list[int]:
    """The degrees of the minimal allocation, the cheapest first; then narrower ones, which are better than nothing."""
    degrees = [part.degree for part in entry.parts if part.degree in entry.speeds] or [min(entry.speeds)]
    return degrees + [degree for degree in reversed(entry.speeds) if degree < min(degrees)]
