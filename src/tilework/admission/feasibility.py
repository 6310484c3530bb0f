"""The proof that all promised deadlines can be kept; `admission.reservations` has the theory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilework.admission.contract import Reserves
from tilework.admission.effect_tree import Key
from tilework.admission.proof_search import Candidate, Degrees, ProofSearch
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservation_timeline import DeviceTimes
from tilework.admission.what_if import WhatIf, due, is_before
from tilework.core.block import Block
from tilework.core.policy import JobView
from tilework.core.time import NEVER_NS, Margin

_NUM_NEAR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityProof:
    """Evidence that promised jobs can end in time: they can if devices are free by `spared_ns` and ends keep `ends_ns`.

    Of many reservations only the *near* ones, due before `far_from`, are searched. The *far* ones keep their groups:
    they are in time if near reservations leave each device by `far_spared_ns`. The times by which far reservations must
    have ended follow from the book, as of `as_of_ns`: reservations that have ended since only leave them more time. All
    keep this `margin`.

    `granted_ns` are the ends of jobs that cannot be in time any more. They must not become later.
    """

    spared_ns: DeviceTimes
    ends_ns: Mapping[int, int]
    far_from: tuple[int, int] | None
    far_spared_ns: DeviceTimes
    as_of_ns: int
    book: ReservationBook
    margin: Margin
    granted_ns: Mapping[int, int]

    def holds(self, view: Reserves) -> bool:
        """Return whether it is certain, without a search, that no promised job must be started yet."""
        devices = (*view.devices, *view.slots)
        if self.granted_ns or self.margin != view.margins.guard or len(devices) != len(self.spared_ns):
            return False
        far_ns = min(self.far_spared_ns.values(), default=0)
        for device in devices:
            if device.free_ns >= self.spared_ns.get(device.device_id, 0):
                return False
            for work in device.works:
                for job_id in work.job_ids:
                    job = view.job(job_id)
                    end_ns = self.ends_ns.get(job_id)
                    if job is None or job.promised is None:
                        continue
                    ready_ns = device.end_ns(work)
                    if end_ns is not None and ready_ns + job.promised.demand.run_ns > end_ns:
                        return False
                    if end_ns is None and ready_ns <= far_ns and job.promised.devices and job.promised.demand.run_ns:
                        continue  # `_is_in_time` would return the same, but later: there may be hundreds of works.
                    if end_ns is None and not self._leaves_far(job, job.promised, ready_ns):
                        return False
        return True

    def _leaves_far(self, job: JobView, block: Block, ready_ns: int) -> bool:
        """Return whether a job whose works end then is in time if it is far."""
        if is_before(job, self.far_from):
            return True
        return _is_in_time(self.book, due(job), block, ready_ns, self.far_spared_ns, self.margin, self.as_of_ns)

    def is_usable(self, what_if: WhatIf) -> bool:
        """Return whether the devices and the margin are the same, and enough near jobs remain."""
        is_few = self.far_from is not None and 2 * self.num_near(what_if.view) < _NUM_NEAR
        is_same = self.margin == what_if.view.margins.guard and self.spared_ns.keys() == what_if.free_ns.keys()
        return is_same and not is_few

    def num_near(self, view: Reserves) -> int:
        promised = view.promised()
        return len(promised) if self.far_from is None else bisect_left(promised, self.far_from, key=due)

    def is_harmless(self, after: WhatIf) -> bool:
        """Return whether starts need no search: the promised jobs that they start are far, and delay no near job."""
        if any(free_ns > self.spared_ns[device_id] for device_id, free_ns in after.free_ns.items()):
            return False
        jobs = map(after.view.job, after.changed)
        return all(job is not None and not is_before(job, self.far_from) for job in jobs)

    def followed_by(self, search: ProofSearch, candidate: Candidate) -> FeasibilityProof:
        """Return the proof by a candidate with the near jobs."""
        found = FeasibilityProof.of_near(search, candidate, self.book)
        return replace(found, far_from=self.far_from, as_of_ns=self.as_of_ns)

    @staticmethod
    def of_near(search: ProofSearch, candidate: Candidate, book: ReservationBook) -> FeasibilityProof:
        """Return the proof by a candidate of a search over the near jobs, or over all."""
        count = len(search.jobs)
        every = search.what_if.view.promised()
        far_from = due(every[count]) if count < len(every) else None
        spared_ns, ends_ns = search.backwards(candidate)
        return FeasibilityProof(
            spared_ns=spared_ns,
            ends_ns={job.job_id: end_ns for job, end_ns in zip(search.jobs, ends_ns, strict=True)},
            far_from=far_from,
            far_spared_ns=search.far_spared_ns,
            as_of_ns=search.what_if.now_ns,
            book=book,
            margin=search.what_if.view.margins.guard,
            granted_ns=search.granted_ns(candidate),
        )

    @staticmethod
    def after(search: ProofSearch, candidate: Candidate, book: ReservationBook) -> FeasibilityProof:
        """Return the proof by a candidate with all jobs. Late jobs are near, and with few jobs all are near."""
        count = len(search.jobs)
        last_late = max((index for index, late_ns in enumerate(candidate.lates_ns) if late_ns), default=-1)
        cut = count if count <= 2 * _NUM_NEAR else max(_NUM_NEAR, last_late + 1)
        ends_ns = search.backwards(candidate)[1]
        far_spared_ns = _first_starts(search.what_if.free_ns, candidate.blocks[cut:], ends_ns[cut:])
        proof = FeasibilityProof.of_near(search, candidate, book)
        if cut == count:
            return proof
        near = {job.job_id: end_ns for job, end_ns in zip(search.jobs[:cut], ends_ns[:cut], strict=True)}
        return replace(proof, ends_ns=near, far_from=due(search.jobs[cut]), far_spared_ns=far_spared_ns)

    def leaves_far(self, after: WhatIf) -> bool:
        """Return whether the far jobs that are started end in time."""
        changed = ((after.view.job(job_id), block) for job_id, block in after.changed.items())
        return all(job is None or self._leaves_far(job, block, block.ready_ns) for job, block in changed)


def _is_in_time(
    book: ReservationBook,
    key: Key,
    block: Block,
    ready_ns: int,
    far_spared_ns: DeviceTimes,
    margin: Margin,
    now_ns: int,
) -> bool:
    """Return whether a far reservation is in time if its job is ready then.

    It is if the job is ready before any far reservation must begin on one of its devices, as it nearly always is.
    """
    for device_id, from_ns, _ in block.if_unloaded.windows() if block.demand.run_ns else ():
        if ready_ns + from_ns <= far_spared_ns.get(device_id, 0):
            return True
    return ready_ns + block.demand.run_ns <= book.latest_end_ns(key, margin, now_ns)


def near_search(book: ReservationBook, what_if: WhatIf, degrees: Degrees) -> ProofSearch | None:
    """Return the search over the near jobs, with the groups of far ones kept.

    None if far reservations lack a group or are late even so, or if there are few jobs: then all are to be searched.
    """
    promised = what_if.view.promised()
    if len(promised) <= 2 * _NUM_NEAR:
        return None
    far_from = due(promised[_NUM_NEAR])
    if any(key >= far_from for key in book.unplaced):
        return None
    margin = what_if.view.margins.guard
    far_spared_ns = book.spared_ns(far_from, margin, what_if.now_ns)
    for due_ns, job_id, block in what_if.view.begun_reservations():
        key = (due_ns, job_id)
        now_ns = what_if.now_ns
        if key >= far_from and not _is_in_time(book, key, block, block.ready_ns, far_spared_ns, margin, now_ns):
            return None
    return ProofSearch.of_first(_NUM_NEAR, what_if, degrees, far_spared_ns, {})


def _first_starts(devices: Iterable[int], blocks: Sequence[Block], ends_ns: Sequence[int]) -> DeviceTimes:
    """Return when the first of these blocks begins on each device, given the blocks' ends; NEVER_NS without one."""
    starts_ns: DeviceTimes = {}
    devices = set(devices)
    for block, end_ns in zip(blocks, ends_ns, strict=True):
        if block.demand.run_ns:
            for device_id, from_ns, _ in block.windows():
                if device_id in devices:
                    starts_ns[device_id] = end_ns - block.demand.run_ns + from_ns
                    devices.remove(device_id)
        if not devices:
            break
    return {**starts_ns, **dict.fromkeys(devices, NEVER_NS)}
