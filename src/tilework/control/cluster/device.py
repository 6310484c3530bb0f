"""A device as the controller records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tilework.control.cluster.job import Job
from tilework.core.component import Component, LoadSource, Memory, num_bytes
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.work import Work

NO_WORK = 0
"""Id that stands for no work. Works are numbered from 1."""


@dataclass(slots=True)
class Now:
    """The time of the event that is being handled."""

    ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class PendingLoad:
    """A load of a device that has not ended; `left_ns` is the time that it is predicted to take from now on.

    `work_id` is the first of the works that wait for it; `NO_WORK` if none does. `is_measured`: its time will tell the
    speed of its source. `is_there`: works have used what it loads, and only its report is missing.
    """

    load_id: int
    work_id: int
    components: tuple[Component, ...]
    source: LoadSource
    forgets: tuple[Component, ...]
    left_ns: int
    is_measured: bool
    is_there: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """The works of one device, and the time at which it is expected to be free; a `DeviceView` to policies.

    `residents` are the jobs of which it keeps something, the most recently used last. The running work is expected to
    end now at the earliest, however late it is; `now` is shared by all devices. A device that `is_cordoned` gets no
    further works. `memory` is as of the end of its works and `loads`. Loads that works wait for are part of the time of
    the first of these works. The other loads go on while the device has no works.

    `head_ns` is the predicted end of the running work, as of the last change, `head_from_ns` the time since which it is
    the first, and `queued_ns` the time of the works after it. A device whose works or loads change puts itself into
    `changed`, which devices may share.
    """

    device_id: int
    node: int
    pool: int
    kind: DeviceKind = DeviceKind.ACCELERATOR
    now: Now = field(default_factory=Now)
    memory: Memory = field(default_factory=Memory)
    works: list[Work] = field(default_factory=list)
    loads: dict[int, PendingLoad] = field(default_factory=dict)  # By id, in order.
    residents: dict[int, Job] = field(default_factory=dict)
    num_changes: int = 0
    is_cordoned: bool = False
    changed: dict[int, Device] = field(default_factory=dict)
    head_ns: int = 0
    head_from_ns: int = 0
    queued_ns: int = 0
    _runs_ns: list[int] = field(default_factory=list)  # Predicted time of each work after the work before it.
    _loads_as_of_ns: int = 0  # The time as of which `left_ns` of its loads holds.
    _after_loads: set[int] = field(default_factory=set)  # The works that waited for a load, or still do.

    @property
    def free_ns(self) -> int:
        return self.idle_ns + self.ahead_ns() if self.loads else self.idle_ns

    @property
    def idle_ns(self) -> int:
        """Predicted end of its works. Loads ahead of need may go on after that."""
        return max(self.head_ns, self.now.ns) + self.queued_ns if self.works else self.now.ns

    @property
    def work_ids(self) -> Iterator[int]:
        return (work.work_id for work in self.works)

    def note_change(self) -> None:
        self.changed[self.device_id] = self

    # Loads.

    @property
    def is_loading(self) -> bool:
        return any(load.work_id == NO_WORK for load in self.loads.values())

    @property
    def lacks_something(self) -> bool:
        """True if some of its `memory` is not there yet."""
        return not all(load.is_there for load in self.loads.values())

    def load_ns(self, work_id: int) -> int:
        """Return how long the loads take for which this work is the first to wait."""
        return sum([load.left_ns for load in self.loads.values() if load.work_id == work_id])

    def waits_for_load(self, work_id: int) -> bool:
        return any(load.work_id == work_id and not load.is_there for load in self.loads.values())

    def ahead_ns(self, wanted: Sequence[Component] | None = None) -> int:
        """Return how long the loads take that no work waits for: those with a wanted component, or all."""
        self._advance_loads()
        return sum(
            [
                load.left_ns
                for load in self.loads.values()
                if load.work_id == NO_WORK and (wanted is None or not set(wanted).isdisjoint(load.components))
            ]
        )

    def add_load(self, load: PendingLoad) -> None:
        self._advance_loads()
        self.note_change()
        self.loads[load.load_id] = load
        self._note_wait(load)

    def end_load(self, load_id: int) -> PendingLoad | None:
        """Remove a load, if the device has it."""
        self._advance_loads()
        load = self.loads.pop(load_id, None)
        if load is not None and load.work_id == NO_WORK:
            self.num_changes += 1
        self.note_change()
        return load

    def await_loads(self, work_id: int, wanted: Sequence[Component]) -> None:
        """Let a work wait for the loads with a component that it needs, unless another work waits for them."""
        self._advance_loads()
        self.note_change()
        for load in self.loads.values():
            if load.work_id == NO_WORK and not set(wanted).isdisjoint(load.components):
                load.work_id = work_id
                self._note_wait(load)

    def leave_out(self, dropped: Sequence[Component]) -> None:
        """Take components that are to be dropped out of the loads that no work waits for."""
        self._advance_loads()
        self.note_change()
        for load in [one for one in self.loads.values() if one.work_id == NO_WORK]:
            left = tuple(one for one in load.components if one not in dropped)
            if len(left) < len(load.components):
                load.left_ns = load.left_ns * num_bytes(left) // max(1, num_bytes(load.components))
                load.components = left
                load.is_measured = False

    def release_loads(self, work: Work, needed: Callable[[Stage], Sequence[Component]], *, has_run: bool) -> None:
        """Let other works, or none, wait for the loads of a work that ends. If it has run, what it needed is there.

        `needed` returns the components of a stage.
        """
        self._advance_loads()
        self.note_change()
        for load in [one for one in self.loads.values() if one.work_id == work.work_id]:
            if has_run and set(load.components) <= set(needed(work.stage)):
                load.is_there = True
                load.left_ns = 0
                continue
            others = (one for one in self.works if one is not work)
            waits = next((one for one in others if not set(needed(one.stage)).isdisjoint(load.components)), None)
            load.work_id = NO_WORK if waits is None else waits.work_id
            self._note_wait(load)
            if waits is not None and (index := self._index(waits)):
                self._runs_ns[index] += load.left_ns
                self.queued_ns += load.left_ns

    def _advance_loads(self) -> None:
        """Subtract the time that has passed from the loads of the first work, or of none, one after another."""
        passed_ns, self._loads_as_of_ns = self.now.ns - self._loads_as_of_ns, self.now.ns
        work_id = self.works[0].work_id if self.works else NO_WORK
        for load in self.loads.values() if passed_ns else ():
            if load.work_id == work_id:
                done_ns = min(passed_ns, load.left_ns)
                load.left_ns -= done_ns
                passed_ns -= done_ns

    def _note_wait(self, load: PendingLoad) -> None:
        if load.work_id != NO_WORK:
            self._after_loads.add(load.work_id)

    def has_loaded(self, work: Work) -> bool:
        """Return whether one of its works waited for a load."""
        return work.work_id in self._after_loads

    # Works.

    def has(self, work: Work) -> bool:
        return self._index(work) is not None

    def before(self, work: Work) -> Work | None:
        """Return the work before one of its works; None if that is the first."""
        index = self._index(work)
        return self.works[index - 1] if index else None

    def end_ns(self, work: Work) -> int:
        end_ns = max(self.head_ns, self.now.ns)
        for index, one in enumerate(self.works):
            if index:
                end_ns += self._runs_ns[index]
            if one is work:
                return end_ns
        return 0

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes the wait for the others of its group."""
        self._advance_loads()
        run_ns = end_ns - self.idle_ns
        if self.works:
            self.queued_ns += run_ns
        else:
            self.head_ns, self.head_from_ns = end_ns, self.now.ns
        self.works.append(work)
        self._runs_ns.append(run_ns)
        self.num_changes += 1
        self.note_change()

    def pop(self, work: Work) -> None:
        """Remove a work, if the device has it."""
        index = self._index(work)
        if index is None:
            return
        self._advance_loads()
        self._after_loads.discard(work.work_id)
        del self.works[index]
        run_ns = self._runs_ns.pop(index)
        self.num_changes += 1
        self.note_change()
        if index:
            self.queued_ns -= run_ns
        elif self.works:
            self.head_ns, self.head_from_ns = self.now.ns + self._runs_ns[0], self.now.ns
            self.queued_ns -= self._runs_ns[0]

    def shorten(self, work: Work, run_ns: int) -> None:
        """Lower the predicted time of a work to `run_ns`, counted from now if it is running; never raise it.

        The loads before a queued work are carried out even if it is revoked.
        """
        index = self._index(work)
        if index is None:
            return
        self.num_changes += 1
        self.note_change()
        if index and self.loads:
            run_ns += self.load_ns(work.work_id)
        if index == 0:
            self.head_ns = min(max(self.head_ns, self.now.ns), self.now.ns + run_ns)
        elif run_ns < self._runs_ns[index]:
            self.queued_ns -= self._runs_ns[index] - run_ns
            self._runs_ns[index] = run_ns

    def _index(self, work: Work) -> int | None:
        """Return the index of a work, by identity: comparing works field by field took longer than all else here."""
        for index, one in enumerate(self.works):
            if one is work:
                return index
        return None
