"""One round of TetriServe: which jobs run in it, at which degree, on which devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.request import Shape
from tilework.core.work import Start
from tilework.policy.published.tetriserve.round import Round
from tilework.policy.published.tetriserve.round_batch import RoundBatch, may_share
from tilework.policy.published.tetriserve.round_entry import Entry
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.knapsack import Option, solve_knapsack
from tilework.policy.toolkit.open_devices import is_open
from tilework.policy.toolkit.tasks import NO_STEPS, Task


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
        self._costs, self._round = costs, this_round
        self._free_ns = {device.device_id: device.free_ns for device in view.devices}
        self._nodes = nodes(
            device for device in view.devices if is_open(device, this_round.now_ns, lead_ns=this_round.margin_ns)
        )
        self._allocator = Allocator(self._nodes)
        self._entries = [entry for task in tasks if (entry := Entry.of(task, this_round)) is not None]

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

    def _options(self, entry: Entry, capacity: int) -> list[Option]:
        """The degrees whose choice keeps a task from being late; none if it need not run, or it is of no use."""
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

    def _take(self, entry: Entry, width: int, why: str) -> bool:
        entry.group = self._allocator.take(width, entry.task.job.last_devices) or ()
        entry.why = why
        return bool(entry.group)

    # 4. The tasks that gain by more devices.

    def _widen(self) -> None:
        """Each time the task that gains most per further device gets it; ties by urgency, on-time ones first."""
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
        """Tasks without room join running ones, by urgency; if possible the one with which they made steps before."""
        hosts: dict[tuple[str, Shape], list[Entry]] = {}
        for entry in self._entries:
            if entry.degree == 1 and entry.makes_steps_alone:
                hosts.setdefault(_batch_key(entry.task), []).append(entry)
        for entry in self._entries:
            if not entry.group and entry.makes_steps_alone:
                here, candidates = entry.task.job.last_devices, hosts.get(_batch_key(entry.task), ())
                for host in sorted(candidates, key=lambda host: host.task.job.last_devices != here):
                    if self._may_join(entry.task, host):
                        host.guests.append(entry.task)
                        break

    def _may_join(self, task: Task, host: Entry) -> bool:
        takes_time = task.job.dropped_to_best_effort and not host.task.job.dropped_to_best_effort
        if takes_time or not may_share(host.batch, task, self._costs):
            return False
        batch = self._batch([*host.batch, task], self._round.now_ns)
        return bool(batch.parts) and all(self._is_on_time_in(batch, each) for each in batch.tasks)

    def _batch(self, tasks: Sequence[Task], ready_ns: int) -> RoundBatch:
        return RoundBatch(tasks, ready_ns, self._round.limit_ns, self._costs)

    def _is_on_time_in(self, batch: RoundBatch, task: Task) -> bool:
        """Whether a task that could be on time still can after this round in a batch."""
        end_ns, num_steps_left = batch.ends_ns[task.job.job_id], batch.num_steps_left[task.job.job_id]
        if num_steps_left:
            end_ns = self._round.final_ns(task, end_ns, num_steps_left)
        return end_ns <= task.due_ns or task.earliest_ns > task.due_ns

    # 6. The groups.

    def _choose_groups(self, running: Iterable[Entry]) -> None:
        """Choose the groups once more, now that all widths are known: tasks that can stay on theirs come first."""
        allocator = Allocator(self._nodes)
        order = sorted(running, key=lambda entry: (entry.degree != len(entry.task.job.last_devices), -entry.degree))
        groups = [allocator.take(entry.degree, entry.task.job.last_devices) for entry in order]
        if all(groups):  # Else, over several nodes, those that stay leave no room for a wide one.
            for entry, group in zip(order, groups, strict=True):
                entry.group = group or ()

    def _starts(self, entry: Entry) -> Iterator[Start]:
        task, why = entry.task, entry.reason(self._round)
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
    """What tasks of a batch have in common; coarser than `step_key`, as guidance and previews may differ in a batch."""
    return task.job.request.pipeline, task.job.request.shape
