"""Keeps promised deadlines under every policy; `admission.reservations` has the theory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.admission.contract import Boundary, Reserves
from tilework.admission.feasibility import FeasibilityProof, near_search
from tilework.admission.loads import in_order
from tilework.admission.proof_search import Candidate, Degrees, ProofSearch
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservation_timeline import begin_ns
from tilework.admission.what_if import WhatIf
from tilework.core.block import Block
from tilework.core.events import MeasurementAsked
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.policy import JobView
from tilework.core.time import NEVER_NS, NS_PER_MS, NS_PER_S
from tilework.core.work import Group, LoadAhead, Start
from tilework.cost.demand import usable_degree
from tilework.cost.table_costs import TableCosts
from tilework.policy.toolkit.open_devices import WORKS_PER_DEVICE

FORCED = "its deadline is promised, and it cannot wait any longer"
"""Reason of a work that the guard starts itself."""
_MOST_OFFENDERS = 2
_SOON_NS = NS_PER_MS
_PATIENCE = 16
_MOST_PATIENCE_NS = NS_PER_S


@dataclass(frozen=True, slots=True)
class Review:
    """The starts that may be made, and the reservations that change with them, by job id."""

    starts: tuple[Start, ...] = ()
    blocks: Mapping[int, Block] = field(default_factory=dict)


@dataclass(slots=True)
class GuardCounts:
    """Numbers of starts and stops of policies that the guard has held back, and of starts that it has made itself.

    The better a policy knows what is promised, the closer to zero these numbers are.
    """

    starts_vetoed: int = 0
    stops_vetoed: int = 0
    starts_forced: int = 0


@dataclass(slots=True, kw_only=True)
class ReservationGuard:
    """Reviews the starts of a policy, and starts promised jobs itself when they cannot wait any longer.

    It holds a proof, which `update` renews and all other methods use. `degrees` are those of the policy.
    """

    degrees: Degrees
    book: ReservationBook = field(default_factory=ReservationBook)
    chunk_ns: int = 200 * NS_PER_MS
    counts: GuardCounts = field(default_factory=GuardCounts)
    _known: FeasibilityProof | None = field(default=None, init=False)
    _up: Mapping[int, int] = field(default_factory=dict, init=False)  # The pools of the devices that were up.
    _due_from_ns: int | None = field(default=None, init=False)

    def recheck(self) -> None:
        """Forget the proof, since a reservation is new or has become longer."""
        self._known = None

    # Finding a proof.

    def update(self, view: Reserves, costs: TableCosts, now_ns: int) -> Mapping[int, Block]:
        """Renew the proof; returns the reservations that change, by job id.

        Nothing changes if possible; otherwise groups change. Jobs that cannot be in time any more end as early as they
        can without delaying others, on more devices if that helps.
        """
        self.book.follow(view)
        if not view.promised() or not view.devices:
            self._known = None
            return {}
        if self._known is not None and self._known.holds(view):
            return {}
        what_if = WhatIf.now(view, costs, now_ns)
        if (known := self._known) is not None and known.is_usable(what_if):
            search = ProofSearch.of_first(known.num_near(view), what_if, self.degrees, known.far_spared_ns, {})
            found = self._found(search)
            if found.leaves_room:
                self._known = known.followed_by(search, found)
                return search.adopted(found)
        up = {device_id: device.pool for device_id, device in what_if.up.items()}
        near = near_search(self.book, what_if, self.degrees) if self._up == up else None
        if near is not None:
            found = self._found(near)
            if found.leaves_room:
                self._known = FeasibilityProof.of_near(near, found, self.book)
                return near.adopted(found)
        search = ProofSearch.of_all(what_if, self.degrees, devices_changed=self._up != up)
        found = self._found(search)
        self._up = up
        self._known = FeasibilityProof.after(search, found, self.book)
        return search.adopted(found)

    def _found(self, search: ProofSearch) -> Candidate:
        """Return the candidate that is in time, or else the one that breaks the fewest promises."""
        search.may_change_widths = self._known is None or not self._known.granted_ns
        return search.in_time() or search.least_late()

    # Starts of a policy.

    def review(self, starts: tuple[Start, ...], view: Reserves, costs: TableCosts, now_ns: int) -> Review:
        """Return the starts of a policy that endanger no promise; those of one job are made together or not at all.

        A job that is late already must not get later. A promised job is not moved to a device that may be lost.
        """
        if not starts or self._known is None:
            return Review(starts)
        heard = _on_heard(starts, view)
        what_if = WhatIf.now(view, costs, now_ns, self._known.far_from)
        blocks = self._accepted(what_if.plus(heard))
        review = self._sift(_by_job(heard, view), what_if) if blocks is None else Review(heard, blocks)
        self.counts.starts_vetoed += len(starts) - len(review.starts)
        return review

    def review_stop(
        self, boundary: Boundary, view: Reserves, costs: TableCosts, now_ns: int
    ) -> Mapping[int, Block] | None:
        """Return the reservations that change if the works of some jobs end at this boundary, by job id.

        None if that endangers a promise.
        """
        if self._known is None:
            return {}
        blocks = self._accepted(WhatIf.now(view, costs, now_ns, self._known.far_from).after_stop(boundary))
        self.counts.stops_vetoed += blocks is None
        return blocks

    def review_load(
        self, load: LoadAhead, view: Reserves, costs: TableCosts, now_ns: int
    ) -> Mapping[int, Block] | None:
        """Return the reservations that change with a load ahead of need, by job id; None if it endangers a promise."""
        if self._known is None:
            return {}
        return self._accepted(WhatIf.now(view, costs, now_ns, self._known.far_from).plus_load(load))

    def review_measurement(
        self, asked: MeasurementAsked, devices: Group, view: Reserves, costs: TableCosts, now_ns: int
    ) -> Mapping[int, Block] | None:
        """Return the reservations that change with a measurement there, by job id; None if it endangers a promise."""
        if self._known is None:
            return {}
        what_if = WhatIf.now(view, costs, now_ns, self._known.far_from)
        return self._accepted(what_if.plus_measurement(asked, devices))

    def _sift(self, parts: Sequence[tuple[Start, ...]], what_if: WhatIf) -> Review:
        """Take the parts that leave a proof, one by one, until `_MOST_OFFENDERS` of them leave none."""
        kept = Review()
        num_offenders = 0
        for part in parts:
            after = what_if.plus(part)
            if (blocks := self._accepted(after)) is not None:
                kept = Review(kept.starts + part, blocks)
                what_if = after
            elif (num_offenders := num_offenders + 1) == _MOST_OFFENDERS:
                break
        return kept

    def _accepted(self, after: WhatIf) -> Mapping[int, Block] | None:
        """Renew the proof for the state after some starts; returns the changed reservations, None without a proof."""
        known = self._known
        assert known is not None
        if not known.leaves_far(after):
            return None
        if known.is_harmless(after):
            return after.changes()
        search = ProofSearch.of_first(
            known.num_near(after.view), after, self.degrees, known.far_spared_ns, known.granted_ns
        )
        found = search.in_time()
        if found is None:
            return None
        self._known = known.followed_by(search, found)
        return search.adopted(found)

    # Starting promised jobs.

    def is_due_on_slot(self, start: Start, view: Reserves, costs: TableCosts, now_ns: int) -> bool:
        """Return whether a start on a CPU slot cannot wait any longer, though it leaves no proof.

        It is on the slot that is free first, and of the promised job that is due first of all that need a slot. If
        costs have changed since the reservations were made, this job ends later than the proof says, and would wait
        forever. While the proof leaves it time, another job may have to start first.
        """
        free_ns = {one.device_id: one.free_ns for one in view.slots}
        if self._known is None or free_ns[start.devices[0]] > min(free_ns.values()):
            return False
        for job in view.promised():
            block = job.promised
            if block is not None and block.demand.slot is not None:
                if job.job_id not in start.job_ids:
                    return False
                start_ns = begin_ns(block, WhatIf.now(view, costs, now_ns).free_ns)
                spare_ns = self._known.ends_ns.get(job.job_id, 0) - start_ns - block.demand.run_ns
                return spare_ns < _SOON_NS
        return False

    def forced(self, view: Reserves, costs: TableCosts, now_ns: int) -> tuple[Start, ...]:
        """Return the next work of each promised job that must start within a millisecond, on its group."""
        known = self._known
        if known is None or all(
            device.free_ns + _SOON_NS <= known.spared_ns[device.device_id] for device in view.devices
        ):
            self._due_from_ns = None
            return ()
        starts = tuple(self._starts(WhatIf.now(view, costs, now_ns), known))
        self.counts.starts_forced += len(starts)
        if starts:
            self._due_from_ns = None
        elif self._due_from_ns is None:
            self._due_from_ns = now_ns
        return starts

    def _starts(self, what_if: WhatIf, known: FeasibilityProof) -> Iterator[Start]:
        """Yield the starts of urgent jobs, in order of deadlines.

        A job is not started on a device of an earlier reservation: the later works of that reservation would have to
        wait.
        """
        held: set[int] = set()
        room = {device.device_id: WORKS_PER_DEVICE - len(device.works) for device in what_if.view.devices}
        num_near = known.num_near(what_if.view)
        blocks = what_if.view.reserved(num_near)
        blocks = in_order(blocks) if what_if.view.needs_loads else blocks  # As in the proof.
        for job, block in zip(what_if.view.promised()[:num_near], blocks, strict=True):
            cursor = what_if.cursor(job)
            if cursor.stage is None or not block.devices:  # No device that may run it is up.
                continue
            spare_ns = known.ends_ns[job.job_id] - begin_ns(block, what_if.free_ns) - block.demand.run_ns
            is_here = cursor.stage.kind is DeviceKind.ACCELERATOR and not _is_on_slot(job)
            if is_here and spare_ns < _SOON_NS and not job.is_stopping:
                start = self._next_start(job, cursor, block.devices, what_if.costs)
                if held.isdisjoint(start.devices) and all(room[device_id] > 0 for device_id in start.devices):
                    for device_id in start.devices:
                        room[device_id] -= 1
                    yield start
            held.update(block.devices)
            if len(held) == len(room):
                return

    def _next_start(self, job: JobView, cursor: Cursor, group: Group, costs: TableCosts) -> Start:
        """Return a start of the next stage of a job, or of a chunk of its steps, on its group."""
        assert cursor.stage is not None
        degree = 1
        num_steps = 1
        if cursor.stage.has_steps:
            degree = usable_degree(job.request, len(group), costs)
            step_ns = costs.work_ns(cursor.stage, (job.request,), degree)
            num_steps = max(1, min(cursor.num_left_here, self.chunk_ns // max(1, step_ns)))
        devices = tuple(sorted(group[:degree]))
        return Start(stage=cursor.stage, job_ids=(job.job_id,), devices=devices, num_steps=num_steps, why=FORCED)

    def wake_ns(self, view: Reserves, now_ns: int) -> int | None:
        """Return when to check again if no event occurs, so that no promised job waits forever; None: never.

        A job that is due may have to wait for another one, or for a device that hangs: usually an event ends that. So
        the longer nothing could be started, the more rarely it is checked again; other jobs are due at their times.
        """
        known = self._known
        if known is None or all(job.works for job in view.promised()):
            return None
        waited_ns = 0 if self._due_from_ns is None else now_ns - self._due_from_ns
        again_ns = now_ns + max(_SOON_NS, min(waited_ns // _PATIENCE, _MOST_PATIENCE_NS))
        dues_ns = [known.spared_ns[device.device_id] for device in view.devices if not device.works]
        wakes_ns = [again_ns if due_ns <= now_ns + _SOON_NS else due_ns for due_ns in dues_ns]
        # Jobs that are due on a slot start at this event, or when they are ready.
        wakes_ns += [
            at_ns for slot in view.slots if not slot.works and (at_ns := known.spared_ns[slot.device_id]) > now_ns
        ]
        at_ns = min(wakes_ns, default=NEVER_NS)
        return None if at_ns == NEVER_NS else at_ns


def _is_on_slot(job: JobView) -> bool:
    """Return whether it waits for a CPU slot to end its work; its next work is started when that has ended."""
    return bool(job.works) and job.works[-1].stage.kind is DeviceKind.CPU


def _on_heard(starts: tuple[Start, ...], view: Reserves) -> tuple[Start, ...]:
    """Return the starts without those of promised jobs on silent devices, unless their reservations are there."""
    if not (silent := view.silent):
        return starts
    held: set[int] = set()
    for start in starts:
        there = silent & set(start.devices)
        promised = [job.promised for one in start.job_ids if (job := view.job(one)) is not None]
        if any(block is not None and not there <= set(block.devices) for block in promised):
            held.update(start.job_ids)
    if not held:
        return starts
    kept = tuple(start for start in starts if held.isdisjoint(start.job_ids))
    dropped = {one for start in starts if start not in kept for one in start.job_ids}
    return tuple(start for start in kept if dropped.isdisjoint(start.job_ids))


def _by_job(starts: Sequence[Start], view: Reserves) -> list[tuple[Start, ...]]:
    """Return the starts of each job, of promised jobs first, by deadline. Jobs that share a work are one part."""
    part_of: dict[int, int] = {}
    for start in starts:
        parts = {part_of.get(job_id, job_id) for job_id in start.job_ids}
        first = min(parts)
        part_of.update({job_id: first for job_id, part in part_of.items() if part in parts})
        part_of.update(dict.fromkeys(start.job_ids, first))
    by_part: dict[int, list[Start]] = {}
    for job in view.promised():
        if job.job_id in part_of:
            by_part.setdefault(part_of[job.job_id], [])
    for start in starts:
        by_part.setdefault(part_of[start.job_ids[0]], []).append(start)
    return [tuple(part) for part in by_part.values()]
