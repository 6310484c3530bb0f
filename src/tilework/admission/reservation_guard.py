"""Keeps promises, whatever the policy wants: see `admission.reservations` for the theory of operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.admission.feasibility import Degrees, FeasibilityProof, Part
from tilework.admission.reservation_timeline import NEVER
from tilework.admission.what_if import WhatIf
from tilework.core.interfaces import Block, ClusterView, CostModel, JobView
from tilework.core.progress import Cursor
from tilework.core.time import NS_PER_MS
from tilework.core.work import DIFFUSE, Group, Start
from tilework.policy.toolkit.demand import usable_degree
from tilework.policy.toolkit.fixed_groups import WORKS_PER_LANE

_MOST_OFFENDERS = 2
_SOON_NS = NS_PER_MS


@dataclass(frozen=True, slots=True)
class Review:
    """The starts that may be made, and what has to be reserved otherwise then, by job id."""

    starts: tuple[Start, ...] = ()
    blocks: Mapping[int, Block] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ReservationGuard:
    """Reviews the starts of a policy, and starts promised jobs itself when they cannot wait any longer.

    It holds a proof, which `settled` brings up to date; all else refers to that.
    """

    chunk_ns: int = 200 * NS_PER_MS
    _known: FeasibilityProof | None = field(default=None, init=False)
    _up: frozenset[int] = field(default=frozenset(), init=False)

    def recheck(self) -> None:
        """Forget the proof: there is a new promise, or one of which more is left than was."""
        self._known = None

    # Finding a proof.

    def settled(self, view: ClusterView, costs: CostModel, degrees: Degrees, now_ns: int) -> Mapping[int, Block]:
        """See to it that there is a proof as things are; returns what has to be reserved otherwise, by job id.

        That is as little as suffices: nothing, or other homes. If some cannot be in time any more, they come as early
        as can be without harm to the others, if it helps on more devices. `degrees` says at which degrees the policy
        may run a request.
        """
        if not view.promised() or not view.devices:
            self._known = None
            return {}
        if self._known is not None and self._known.holds(view):
            return {}
        what_if = WhatIf.now(view, costs, now_ns)
        if (known := self._known) is not None and known.is_usable(what_if):
            part = Part.near(what_if, known, {})
            trial = part.in_time() or part.least_late(degrees)
            if trial.leaves_room:
                self._known = known.followed_by(part, trial)
                return part.adopted(trial)
        part = Part.whole(what_if, homes_are_lost=self._up != what_if.free_ns.keys())
        trial = part.in_time() or part.least_late(degrees)
        self._up = frozenset(what_if.free_ns)
        self._known = FeasibilityProof.after(part, trial)
        return part.adopted(trial)

    # What a policy may start.

    def review(self, starts: tuple[Start, ...], view: ClusterView, costs: CostModel, now_ns: int) -> Review:
        """Those of a policy's starts that endanger no promise; each job's starts together or not at all.

        A promise that is in danger already must not get worse.
        """
        if not starts or self._known is None:
            return Review(starts)
        what_if = WhatIf.now(view, costs, now_ns, self._known.far_from)
        blocks = self._accepted(what_if.plus(starts))
        return self._sift(_by_job(starts, view), what_if) if blocks is None else Review(starts, blocks)

    def _sift(self, parts: Sequence[tuple[Start, ...]], what_if: WhatIf) -> Review:
        """Take part by part what keeps the promises, until some do not."""
        kept, num_offenders = Review(), 0
        for part in parts:
            after = what_if.plus(part)
            if (blocks := self._accepted(after)) is not None:
                kept, what_if = Review(kept.starts + part, blocks), after
            elif (num_offenders := num_offenders + 1) == _MOST_OFFENDERS:
                break
        return kept

    def _accepted(self, after: WhatIf) -> Mapping[int, Block] | None:
        """Go on to a later what_if; returns what has to be reserved otherwise. None if there is no proof for it."""
        known = self._known
        assert known is not None
        if not known.leaves_far(after):
            return None
        if known.is_harmless(after):
            return after.changes()
        part = Part.near(after, known, known.granted_ns)
        trial = part.in_time()
        if trial is None:
            return None
        self._known = known.followed_by(part, trial)
        return part.adopted(trial)

    # Starting promised jobs.

    def forced(self, view: ClusterView, costs: CostModel, now_ns: int) -> tuple[Start, ...]:
        """The next piece of each promised job that must start now or in a millisecond, at its home."""
        known = self._known
        if known is None or all(
            device.free_ns + _SOON_NS <= known.latest_ns[device.device_id] for device in view.devices
        ):
            return ()
        what_if = WhatIf.now(view, costs, now_ns)
        return tuple(self._starts(what_if, known))

    def _starts(self, what_if: WhatIf, known: FeasibilityProof) -> Iterator[Start]:
        """Not behind the block of another job, of which only the first piece has been started: the rest would wait."""
        held: set[int] = set()
        room = {device.device_id: WORKS_PER_LANE - len(device.works) for device in what_if.view.devices}
        num_near = known.num_near(what_if.view)
        for job, block in zip(what_if.view.promised()[:num_near], what_if.view.reserved()[:num_near], strict=True):
            cursor = what_if.cursor(job)
            if cursor.stage is None:
                continue
            start_ns = max([block.ready_ns, *(what_if.free_ns[device_id] for device_id in block.devices)])
            spare_ns = known.ends_ns[job.job_id] - start_ns - block.demand.run_ns
            if spare_ns < _SOON_NS and held.isdisjoint(block.devices):
                start = self._piece(job, cursor, block.devices, what_if.costs)
                if all(room[device_id] > 0 for device_id in start.devices):
                    for device_id in start.devices:
                        room[device_id] -= 1
                    yield start
            held.update(block.devices)
            if len(held) == len(room):
                return

    def _piece(self, job: JobView, cursor: Cursor, home: Group, costs: CostModel) -> Start:
        assert cursor.stage is not None
        degree, num_steps = 1, 1
        if cursor.stage.name == DIFFUSE:
            degree = usable_degree(cursor.stage, len(home), costs)
            step_ns = costs.work_ns(cursor.stage, (job.request,), degree)
            num_steps = max(1, min(cursor.num_steps_left, self.chunk_ns // max(1, step_ns)))
        why = "its deadline is promised, and it cannot wait any longer"
        return Start(stage=cursor.stage, job_ids=(job.job_id,), devices=home[:degree], num_steps=num_steps, why=why)

    def wake_ns(self, view: ClusterView, now_ns: int) -> int | None:
        """When to look again at the latest, though nothing happens: idle devices use up what there is to spare."""
        known = self._known
        if known is None or all(job.works for job in view.promised()):
            return None
        due_ns = min([known.latest_ns[device.device_id] for device in view.devices if not device.works], default=NEVER)
        return None if due_ns == NEVER else max(now_ns + _SOON_NS, due_ns)


def _by_job(starts: Sequence[Start], view: ClusterView) -> list[tuple[Start, ...]]:
    """The starts of all promised jobs, then those of each other job, with those of jobs that share a work with it."""
    promised = {job.job_id for job in view.promised()}
    part_of: dict[int, int] = {}
    for start in starts:
        parts = {part_of.get(job_id, job_id) for job_id in start.job_ids}
        first = min(parts)
        part_of.update({job_id: first for job_id, part in part_of.items() if part in parts})
        part_of.update(dict.fromkeys(start.job_ids, first))
    others = {part for job_id, part in part_of.items() if job_id not in promised}
    found: dict[int, list[Start]] = {}
    for start in starts:
        part = part_of[start.job_ids[0]]
        found.setdefault(part if part in others else -1, []).append(start)
    return [tuple(found[key]) for key in sorted(found, key=lambda key: key >= 0)]
