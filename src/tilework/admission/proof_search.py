"""The search for a feasibility proof: candidates for the groups of reservations.

`admission.reservations` has the theory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilework.admission.loads import in_order, moved, reserve
from tilework.admission.reservation_timeline import DeviceTimes, latest_ends, nodes_within, run_in_choices, run_in_order
from tilework.admission.what_if import WhatIf, due
from tilework.core.block import Block
from tilework.core.policy import CostModel, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import NEVER_NS, Margin

Degrees = Callable[[Request, CostModel], Sequence[int]]
"""The degrees at which the policy may run a request."""
_MOST_WIDENED = 2
_FEW = 32
"""Most jobs for which other widths are tried, too."""


@dataclass(slots=True, kw_only=True)
class ProofSearch:
    """A search for groups on which promised jobs end in time: all of them or the near ones, in order of deadlines.

    `dues_ns` are the times by which each block must have ended. `far_spared_ns` are those until which the later blocks
    can spare each device. `may_change_widths`: of all jobs at once; that takes a while, and helps no job that was late
    before.
    """

    what_if: WhatIf
    degrees: Degrees
    jobs: Sequence[JobView]
    blocks: list[Block]
    dues_ns: list[int]
    given_ns: Mapping[int, int]
    far_spared_ns: DeviceTimes
    may_change_widths: bool = True

    @staticmethod
    def of_all(what_if: WhatIf, degrees: Degrees, *, devices_changed: bool = False) -> ProofSearch:
        """Return the search over all reservations; those whose groups are no longer whole get new ones."""
        never_ns = dict.fromkeys(what_if.free_ns, NEVER_NS)
        search = ProofSearch.of_first(len(what_if.view.promised()), what_if, degrees, never_ns, {})
        if devices_changed:
            for index, (job, block) in enumerate(zip(search.jobs, search.blocks, strict=True)):
                if not _is_whole(block, what_if.up):
                    search.blocks[index] = what_if.changed[job.job_id] = moved(block, (), None)
        return search

    @staticmethod
    def of_first(
        num_jobs: int, what_if: WhatIf, degrees: Degrees, far_spared_ns: DeviceTimes, granted_ns: Mapping[int, int]
    ) -> ProofSearch:
        """Return the search over the first `num_jobs` reservations; `granted_ns` as in `FeasibilityProof`."""
        jobs = what_if.view.promised()[:num_jobs]
        blocks = list(what_if.view.reserved(num_jobs))
        for job_id, block in what_if.changed.items():
            job = what_if.view.job(job_id)
            assert job is not None
            index = bisect_left(jobs, due(job), key=due)
            if index < len(blocks):
                blocks[index] = block
        if what_if.view.needs_loads:
            blocks = in_order(blocks)
        dues_ns = what_if.view.margins.guard.latest_all_ns([block.due_ns for block in blocks], what_if.now_ns)
        if granted_ns:
            dues_ns = [max(at_ns, granted_ns.get(job.job_id, 0)) for job, at_ns in zip(jobs, dues_ns, strict=True)]
        return ProofSearch(
            what_if=what_if,
            degrees=degrees,
            jobs=jobs,
            blocks=blocks,
            dues_ns=dues_ns,
            given_ns=granted_ns,
            far_spared_ns=far_spared_ns,
        )

    def with_newcomer(self, newcomer: JobView, margin: Margin) -> ProofSearch:
        """Return the same search with one more job, by this margin."""
        assert newcomer.promised is not None
        index = bisect_left(self.jobs, due(newcomer), key=due)
        now_ns = self.what_if.now_ns
        jobs = [*self.jobs]
        blocks = [*self.blocks]
        jobs.insert(index, newcomer)
        blocks.insert(index, newcomer.promised)
        dues_ns = margin.latest_all_ns([block.due_ns for block in blocks], now_ns)
        return replace(self, jobs=jobs, blocks=blocks, dues_ns=dues_ns)

    def in_time(self) -> Candidate | None:
        """Return the first candidate in time: with the present groups, all groups anew, or all widths anew."""
        return self._unchanged() or next((one for one in self._in_all_ways() if one.is_in_time), None)

    def _in_all_ways(self) -> Iterator[Candidate]:
        yield from self._candidates(self.blocks)
        if self.may_change_widths and len(self.jobs) <= _FEW:
            yield self._in_any_width()

    def _unchanged(self) -> Candidate | None:
        """Return the candidate with the present groups if it is in time; takes half the time of `_candidates`."""
        candidate = Candidate(blocks=self.blocks, dues_ns=self.dues_ns)
        spared_ns, ends_ns = candidate.backwards = self.backwards(candidate)
        if any(free_ns > spared_ns[device_id] for device_id, free_ns in self.what_if.free_ns.items()):
            return None
        has_slots = bool(self.what_if.view.slots)
        for block, end_ns in zip(self.blocks, ends_ns, strict=True):
            if not block.devices or (block.slot is None and has_slots and block.demand.slot is not None):
                return None
            if block.ready_ns and block.ready_ns + block.demand.run_ns > end_ns:
                return None
        return candidate

    def backwards(self, candidate: Candidate) -> tuple[DeviceTimes, Sequence[int]]:
        """Return until when each device can be spared, and when each block must have ended."""
        if candidate.backwards is not None:
            return candidate.backwards
        spared_ns = dict(self.far_spared_ns)
        ends_ns = latest_ends(spared_ns, candidate.blocks, candidate.dues_ns)
        return spared_ns, ends_ns

    def least_late(self) -> Candidate:
        """Return the candidate that breaks the fewest promises; a late job gets more devices if that harms no other."""
        best = min(self._in_all_ways(), key=_lateness)
        late = [index for index, late_ns in enumerate(best.lates_ns) if late_ns]
        for index in late[:_MOST_WIDENED]:
            best = next((wider for wider in self._wider(best, index) if _is_better(wider, best, index)), best)
        return best

    def _wider(self, candidate: Candidate, index: int) -> Iterator[Candidate]:
        former = candidate.blocks[index]
        for wider in self._widths(self.jobs[index], former):
            if wider.demand.width > former.demand.width:
                blocks = list(candidate.blocks)
                blocks[index] = wider
                yield from self._candidates(blocks)

    def _widths(self, job: JobView, former: Block) -> list[Block]:
        """Return the reservation of a job in each width that its policy may give it, without a group, in that order."""
        costs = self.what_if.costs
        cursor = self.what_if.cursor(job)
        widest = max(map(len, nodes_within(self.what_if.places.nodes, former.within)), default=0)
        degrees = self.degrees(job.request, costs) if cursor.stage is not None else ()
        bare, memories = replace(former, devices=(), slot=None), () if self.what_if.view.needs_loads else None
        return [reserve(bare, job.request, cursor, one, memories, costs) for one in degrees if one <= widest]

    def _candidates(self, blocks: Sequence[Block]) -> Iterator[Candidate]:
        for anew in (False, True):
            free_ns = dict(self.what_if.free_ns)
            found, ends_ns = run_in_order(free_ns, self.what_if.places, blocks, anew)
            yield self._candidate(found, ends_ns, free_ns)

    def _in_any_width(self) -> Candidate:
        """Give each job in turn the width that takes the least device time, of those in which it ends in time."""
        choices = []
        for job, former in zip(self.jobs, self.blocks, strict=True):
            blocks = sorted(self._widths(job, former), key=_device_time)
            choices.append(blocks or [moved(former, (), None)])
        free_ns = dict(self.what_if.free_ns)
        found, ends_ns = run_in_choices(free_ns, self.what_if.places, choices, self.dues_ns)
        return self._candidate(found, ends_ns, free_ns)

    def _candidate(self, blocks: Sequence[Block], ends_ns: Sequence[int], free_ns: DeviceTimes) -> Candidate:
        """Return the candidate in which blocks end, and devices are free, at these times."""
        lates_ns = [max(0, end_ns - due_ns) for end_ns, due_ns in zip(ends_ns, self.dues_ns, strict=True)]
        return Candidate(
            blocks=blocks,
            dues_ns=[max(ns) for ns in zip(self.dues_ns, ends_ns, strict=True)] if any(lates_ns) else self.dues_ns,
            lates_ns=lates_ns,
            leaves_room=all(at_ns <= self.far_spared_ns[device_id] for device_id, at_ns in free_ns.items()),
        )

    def granted_ns(self, candidate: Candidate) -> Mapping[int, int]:
        """Return the times at which jobs may end that are late, or were late before."""
        late = zip(self.jobs, candidate.dues_ns, candidate.lates_ns, strict=False)
        return {**self.given_ns, **{job.job_id: due_ns for job, due_ns, late_ns in late if late_ns}}

    def adopted(self, candidate: Candidate) -> Mapping[int, Block]:
        """Give the jobs the groups of a candidate; returns the reservations that change, by job id."""
        if candidate.blocks is not self.blocks:
            for job, former, block in zip(self.jobs, self.blocks, candidate.blocks, strict=True):
                if block is not former:
                    self.what_if.changed[job.job_id] = block
        return self.what_if.changes()


@dataclass(slots=True, kw_only=True)
class Candidate:
    """Blocks with groups, the lateness of each (empty: none is late), and whether later blocks can still be in time.

    `dues_ns` are the times by which each block must have ended; for a late block, its end. `backwards` is the result of
    `ProofSearch.backwards`, once computed.
    """

    blocks: Sequence[Block]
    dues_ns: Sequence[int]
    lates_ns: Sequence[int] = ()
    leaves_room: bool = True
    backwards: tuple[DeviceTimes, Sequence[int]] | None = None

    @property
    def is_in_time(self) -> bool:
        return self.leaves_room and not any(self.lates_ns)


def _is_whole(block: Block, up: Mapping[int, DeviceView]) -> bool:
    """Return whether all devices of a reservation are up, as many as it wants, and all of its group in one pool."""
    if not up.keys() >= {one for one, _, _ in block.windows()} or len(block.devices) < block.demand.width:
        return False
    return len({up[one].pool for one in block.devices}) == 1


def _device_time(block: Block) -> tuple[int, int]:
    return block.demand.device_ns, block.demand.width


def _lateness(candidate: Candidate) -> tuple[bool, int, int]:
    """Return the order of candidates: by room for later blocks, broken promises, time beyond the margins."""
    num_broken = sum(due_ns > block.due_ns for block, due_ns in zip(candidate.blocks, candidate.dues_ns, strict=True))
    return not candidate.leaves_room, num_broken, sum(candidate.lates_ns)


def _is_better(new: Candidate, old: Candidate, index: int) -> bool:
    """Return whether the job at this index is less late, and no other job is later than before."""
    return (
        (new.leaves_room or not old.leaves_room)
        and new.lates_ns[index] < old.lates_ns[index]
        and all(late_ns <= before_ns for late_ns, before_ns in zip(new.lates_ns, old.lates_ns, strict=True))
    )
