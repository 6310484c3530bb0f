"""The proof that all promises can be kept, and how one is found; see `admission.reservations` for the theory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilework.admission.reservation_timeline import NEVER, Times, follow, latest_ends
from tilework.admission.what_if import WhatIf, due
from tilework.core.interfaces import Block, ClusterView, CostModel, JobView
from tilework.core.request import Request
from tilework.policy.toolkit.demand import reserved_at
from tilework.policy.toolkit.margin import GUARD_MARGIN

Degrees = Callable[[Request, CostModel], Sequence[int]]
_NEAR = 64
_MOST_WIDENED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityProof:
    """Promised jobs can end in time, as long as devices are free by `latest_ns` and blocks have ended by `ends_ns`.

    Of many promises the *near* ones are looked at, those that are due before `far_from`, and what they leave to the
    *far* ones is compared with until when these can spare each device; so of far ones, homes stay.

    `granted_ns`: when those may end that cannot be in time any more. That must not get worse.
    """

    latest_ns: Times
    ends_ns: Mapping[int, int]
    far_from: tuple[int, int] | None
    far_latest_ns: Times
    far_ends_ns: Mapping[int, int]
    granted_ns: Mapping[int, int]

    def holds(self, view: ClusterView) -> bool:
        """Whether no promised job must be started yet, without looking at all of them; False if that is not enough."""
        if self.granted_ns or len(view.devices) != len(self.latest_ns):
            return False
        for device in view.devices:
            if device.free_ns >= self.latest_ns.get(device.device_id, 0):
                return False
            for work in device.works:
                for job_id in work.job_ids:
                    end_ns = self.ends_ns.get(job_id) or self.far_ends_ns.get(job_id)
                    if end_ns is not None and not _ends_by(end_ns, view.job(job_id), device.end_ns(work)):
                        return False
        return True

    def is_usable(self, what_if: WhatIf) -> bool:
        """Whether devices are the same, and enough of the near jobs are left."""
        is_few = self.far_from is not None and 2 * self.num_near(what_if.view) < _NEAR
        return self.latest_ns.keys() == what_if.free_ns.keys() and not is_few

    def num_near(self, view: ClusterView) -> int:
        promised = view.promised()
        return len(promised) if self.far_from is None else bisect_left(promised, self.far_from, key=due)

    def is_harmless(self, after: WhatIf) -> bool:
        """Whether there is nothing to look at: only far promised jobs are started, and none wait for it."""
        if any(level_ns > self.latest_ns[device_id] for device_id, level_ns in after.free_ns.items()):
            return False
        return all(job_id in self.far_ends_ns for job_id in after.changed)

    def followed_by(self, part: Part, trial: Trial) -> FeasibilityProof:
        """The one after a trial with the near jobs."""
        latest_ns, ends_ns = part.latest_ns(trial)
        ends_of = {job.job_id: end_ns for job, end_ns in zip(part.jobs, ends_ns, strict=True)}
        return replace(self, latest_ns=latest_ns, ends_ns=ends_of, granted_ns=part.granted_ns(trial))

    @staticmethod
    def after(part: Part, trial: Trial) -> FeasibilityProof:
        """The one after a trial with all jobs: none is far that is late, and of few none is."""
        count, ids = len(part.jobs), [job.job_id for job in part.jobs]
        last_late = max((rank for rank, late_ns in enumerate(trial.lates_ns) if late_ns), default=-1)
        cut = count if count <= 2 * _NEAR else max(_NEAR, last_late + 1)
        latest_ns, ends_ns = part.latest_ns(trial)
        return FeasibilityProof(
            latest_ns=latest_ns,
            ends_ns=dict(zip(ids[:cut], ends_ns[:cut], strict=True)),
            far_from=due(part.jobs[cut]) if cut < count else None,
            far_latest_ns=_first_starts(part.what_if.free_ns, trial.blocks[cut:], ends_ns[cut:]),
            far_ends_ns=dict(zip(ids[cut:], ends_ns[cut:], strict=True)),
            granted_ns=part.granted_ns(trial),
        )

    def leaves_far(self, after: WhatIf) -> bool:
        """Whether far jobs that are started come in time to their homes."""
        return all(
            block.ready_ns + block.demand.run_ns <= self.far_ends_ns.get(job_id, NEVER)
            for job_id, block in after.changed.items()
        )


def _ends_by(end_ns: int, job: JobView | None, ready_ns: int) -> bool:
    return job is None or job.promised is None or ready_ns + job.promised.demand.run_ns <= end_ns


def _first_starts(devices: Iterable[int], blocks: Sequence[Block], ends_ns: Sequence[int]) -> Times:
    """When the first of these blocks on each device begins that ends then; never if none runs there."""
    starts_ns: Times = {}
    devices = set(devices)
    for block, end_ns in zip(blocks, ends_ns, strict=True):
        if block.demand.run_ns:
            for device_id in devices.intersection(block.devices):
                starts_ns[device_id] = end_ns - block.demand.run_ns
                devices.remove(device_id)
        if not devices:
            break
    return {**starts_ns, **dict.fromkeys(devices, NEVER)}


@dataclass(slots=True, kw_only=True)
class Part:
    """Promised jobs in order of their deadlines, the near ones or all: what there is to find homes for.

    `far_latest_ns` is until when those behind them can spare each device.
    """

    what_if: WhatIf
    jobs: Sequence[JobView]
    blocks: list[Block]
    dues_ns: list[int]
    given_ns: Mapping[int, int]
    far_latest_ns: Times

    @staticmethod
    def near(what_if: WhatIf, known: FeasibilityProof, granted_ns: Mapping[int, int]) -> Part:
        return Part._of(what_if, known.num_near(what_if.view), known.far_latest_ns, granted_ns)

    @staticmethod
    def whole(what_if: WhatIf, *, homes_are_lost: bool) -> Part:
        part = Part._of(what_if, len(what_if.view.promised()), dict.fromkeys(what_if.free_ns, NEVER), {})
        if homes_are_lost:
            up = what_if.up.keys()
            part.blocks = [block if up >= set(block.devices) else replace(block, devices=()) for block in part.blocks]
        return part

    @staticmethod
    def _of(what_if: WhatIf, num_jobs: int, far_latest_ns: Times, granted_ns: Mapping[int, int]) -> Part:
        jobs, blocks = what_if.view.promised()[:num_jobs], list(what_if.view.reserved()[:num_jobs])
        for job_id, block in what_if.changed.items():
            job = what_if.view.job(job_id)
            assert job is not None
            rank = bisect_left(jobs, due(job), key=due)
            if rank < len(blocks):
                blocks[rank] = block
        dues_ns = GUARD_MARGIN.latest_all_ns(blocks, what_if.now_ns)
        if granted_ns:
            dues_ns = [max(at_ns, granted_ns.get(job.job_id, 0)) for job, at_ns in zip(jobs, dues_ns, strict=True)]
        return Part(
            what_if=what_if, jobs=jobs, blocks=blocks, dues_ns=dues_ns, given_ns=granted_ns, far_latest_ns=far_latest_ns
        )

    def in_time(self) -> Trial | None:
        """The first that is in time: with the homes as they are, then with all of them chosen anew."""
        return self._as_it_is() or next((trial for trial in self._trials(self.blocks) if trial.is_in_time), None)

    def _as_it_is(self) -> Trial | None:
        """The same as the first of the trials, if it is in time, in half of the time."""
        trial = Trial(blocks=self.blocks, dues_ns=self.dues_ns)
        latest_ns, ends_ns = trial.latest = self.latest_ns(trial)
        if any(free_ns > latest_ns[device_id] for device_id, free_ns in self.what_if.free_ns.items()):
            return None
        for block, end_ns in zip(self.blocks, ends_ns, strict=True):
            if not block.devices or (block.ready_ns and block.ready_ns + block.demand.run_ns > end_ns):
                return None
        return trial

    def latest_ns(self, trial: Trial) -> tuple[Times, Sequence[int]]:
        """Until when devices can be spared, and when each block must have ended."""
        if trial.latest is not None:
            return trial.latest
        latest_ns = dict(self.far_latest_ns)
        ends_ns = latest_ends(latest_ns, trial.blocks, trial.dues_ns)
        return latest_ns, ends_ns

    def least_late(self, degrees: Degrees) -> Trial:
        """With the fewest broken, and some that are late on more devices, where that helps them and harms nobody."""
        best = min(self._trials(self.blocks), key=_lateness)
        late = [index for index, late_ns in enumerate(best.lates_ns) if late_ns]
        for index in late[:_MOST_WIDENED]:
            best = next((wider for wider in self._wider(best, index, degrees) if _is_better(wider, best, index)), best)
        return best

    def _wider(self, trial: Trial, index: int, degrees: Degrees) -> Iterator[Trial]:
        job, former, costs = self.jobs[index], trial.blocks[index], self.what_if.costs
        cursor, widest = self.what_if.cursor(job), max(map(len, self.what_if.nodes))
        for degree in degrees(job.request, costs):
            if cursor.stage is not None and former.demand.width < degree <= widest:
                blocks = list(trial.blocks)
                blocks[index] = replace(former, demand=reserved_at(job.request, cursor, degree, costs), devices=())
                yield from self._trials(blocks)

    def _trials(self, blocks: Sequence[Block]) -> Iterator[Trial]:
        for anew in (False, True):
            levels = dict(self.what_if.free_ns)
            homes, ends_ns = follow(levels, self.what_if.nodes, blocks, anew)
            lates_ns = [max(0, end_ns - due_ns) for end_ns, due_ns in zip(ends_ns, self.dues_ns, strict=True)]
            leaves_room = all(level_ns <= self.far_latest_ns[device_id] for device_id, level_ns in levels.items())
            yield Trial(
                blocks=[
                    block if block.devices == home else replace(block, devices=home)
                    for block, home in zip(blocks, homes, strict=True)
                ],
                dues_ns=[max(ns) for ns in zip(self.dues_ns, ends_ns, strict=True)] if any(lates_ns) else self.dues_ns,
                lates_ns=lates_ns,
                leaves_room=leaves_room,
            )

    def granted_ns(self, trial: Trial) -> Mapping[int, int]:
        """When those may end that are late, or were late already."""
        late = zip(self.jobs, trial.dues_ns, trial.lates_ns, strict=False)
        return {**self.given_ns, **{job.job_id: due_ns for job, due_ns, late_ns in late if late_ns}}

    def adopted(self, trial: Trial) -> Mapping[int, Block]:
        """Give the jobs these homes; returns all that has to be reserved otherwise, by job id."""
        if trial.blocks is not self.blocks:
            for job, former, block in zip(self.jobs, self.blocks, trial.blocks, strict=True):
                if block is not former:
                    self.what_if.changed[job.job_id] = block
        return self.what_if.changes()


@dataclass(slots=True, kw_only=True)
class Trial:
    """Blocks with homes, by how much each is late (empty: none is), and whether those behind can still be in time.

    `dues_ns`: by when each has to end; when it ends for those that are late. `latest` is what follows from that.
    """

    blocks: Sequence[Block]
    dues_ns: Sequence[int]
    lates_ns: Sequence[int] = ()
    leaves_room: bool = True
    latest: tuple[Times, Sequence[int]] | None = None

    @property
    def is_in_time(self) -> bool:
        return self.leaves_room and not any(self.lates_ns)


def _lateness(trial: Trial) -> tuple[bool, int, int]:
    """Reservations that cannot be kept count first, then what is taken from the margins of others."""
    num_broken = sum(due_ns > block.due_ns for block, due_ns in zip(trial.blocks, trial.dues_ns, strict=True))
    return not trial.leaves_room, num_broken, sum(trial.lates_ns)


def _is_better(new: Trial, old: Trial, index: int) -> bool:
    """Whether this one is less late, and nobody later than he was."""
    return (
        new.leaves_room >= old.leaves_room
        and new.lates_ns[index] < old.lates_ns[index]
        and all(late_ns <= before_ns for late_ns, before_ns in zip(new.lates_ns, old.lates_ns, strict=True))
    )
