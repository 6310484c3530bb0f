"""The proof that all promised deadlines can be kept; `admission.reservations` has the theory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilework.admission.proof_search import Candidate, ProofSearch
from tilework.admission.reservation_timeline import DeviceTimes
from tilework.admission.what_if import WhatIf, due
from tilework.core.interfaces import Block, ClusterView, JobView
from tilework.core.time import NEVER_NS

_NUM_NEAR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityProof:
    """Evidence that promised jobs can end in time: they can if devices are free by `spared_ns` and ends keep `ends_ns`.

    Of many reservations only the *near* ones, due before `far_from`, are searched. The *far* ones keep their groups:
    it is enough that near reservations leave each device by `far_spared_ns`, until when far reservations can spare it.

    `granted_ns` is when jobs may end that cannot be in time any more. They must not become later.
    """

    spared_ns: DeviceTimes
    ends_ns: Mapping[int, int]
    far_from: tuple[int, int] | None
    far_spared_ns: DeviceTimes
    far_ends_ns: Mapping[int, int]
    granted_ns: Mapping[int, int]

    def holds(self, view: ClusterView) -> bool:
        """Whether it is certain, without a search, that no promised job must be started yet."""
        devices = (*view.devices, *view.slots)
        if self.granted_ns or len(devices) != len(self.spared_ns):
            return False
        for device in devices:
            if device.free_ns >= self.spared_ns.get(device.device_id, 0):
                return False
            for work in device.works:
                for job_id in work.job_ids:
                    end_ns = self.ends_ns.get(job_id) or self.far_ends_ns.get(job_id)
                    if end_ns is not None and not _ends_by(end_ns, view.job(job_id), device.end_ns(work)):
                        return False
        return True

    def is_usable(self, what_if: WhatIf) -> bool:
        """Whether the devices are the same, and enough near jobs remain."""
        is_few = self.far_from is not None and 2 * self.num_near(what_if.view) < _NUM_NEAR
        return self.spared_ns.keys() == what_if.free_ns.keys() and not is_few

    def num_near(self, view: ClusterView) -> int:
        promised = view.promised()
        return len(promised) if self.far_from is None else bisect_left(promised, self.far_from, key=due)

    def is_harmless(self, after: WhatIf) -> bool:
        """Whether starts need no search: the promised jobs that they start are far, and they delay no near job."""
        if any(free_ns > self.spared_ns[device_id] for device_id, free_ns in after.free_ns.items()):
            return False
        return all(job_id in self.far_ends_ns for job_id in after.changed)

    def followed_by(self, search: ProofSearch, candidate: Candidate) -> FeasibilityProof:
        """The proof by a candidate with the near jobs."""
        spared_ns, ends_ns = search.backwards(candidate)
        ends_of = {job.job_id: end_ns for job, end_ns in zip(search.jobs, ends_ns, strict=True)}
        return replace(self, spared_ns=spared_ns, ends_ns=ends_of, granted_ns=search.granted_ns(candidate))

    @staticmethod
    def after(search: ProofSearch, candidate: Candidate) -> FeasibilityProof:
        """The proof by a candidate with all jobs. Late jobs are near, and with few jobs all are near."""
        count, ids = len(search.jobs), [job.job_id for job in search.jobs]
        last_late = max((rank for rank, late_ns in enumerate(candidate.lates_ns) if late_ns), default=-1)
        cut = count if count <= 2 * _NUM_NEAR else max(_NUM_NEAR, last_late + 1)
        spared_ns, ends_ns = search.backwards(candidate)
        return FeasibilityProof(
            spared_ns=spared_ns,
            ends_ns=dict(zip(ids[:cut], ends_ns[:cut], strict=True)),
            far_from=due(search.jobs[cut]) if cut < count else None,
            far_spared_ns=_first_starts(search.what_if.free_ns, candidate.blocks[cut:], ends_ns[cut:]),
            far_ends_ns=dict(zip(ids[cut:], ends_ns[cut:], strict=True)),
            granted_ns=search.granted_ns(candidate),
        )

    def leaves_far(self, after: WhatIf) -> bool:
        """Whether the far jobs that are started end in time."""
        return all(
            block.ready_ns + block.demand.run_ns <= self.far_ends_ns.get(job_id, NEVER_NS)
            for job_id, block in after.changed.items()
        )


def _ends_by(end_ns: int, job: JobView | None, ready_ns: int) -> bool:
    return job is None or job.promised is None or ready_ns + job.promised.demand.run_ns <= end_ns


def _first_starts(devices: Iterable[int], blocks: Sequence[Block], ends_ns: Sequence[int]) -> DeviceTimes:
    """When the first of these blocks begins on each device, given the blocks' ends; NEVER_NS without a block."""
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
