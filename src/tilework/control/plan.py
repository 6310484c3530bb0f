"""The policy's plan as actions: works to start and to stop, reservations, and the time to wake up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.components import Components
from tilework.control.expiry import Expiry
from tilework.control.measurements import Measurements
from tilework.control.recovery import Recovery
from tilework.control.slots import slot_starts
from tilework.core.actions import Action, DropState, DropToBestEffort, HoldBack, MoveState, Place, RunWork, Stop, WakeAt
from tilework.core.block import Block
from tilework.core.policy import Policy
from tilework.core.request import Status
from tilework.core.work import Group, LoadAhead, Plan, Start
from tilework.cost.table_costs import TableCosts

_MOST_PLANS = 3  # Plans for one event.


class Planner:
    """Asks the policy, lets the guard review its plan, and commits the accepted starts to the tracker.

    A device keeps state or conditioning of at most `max_residents` jobs, unless more have works there.
    """

    def __init__(
        self,
        policy: Policy,
        costs: TableCosts,
        tracker: Tracker,
        guard: ReservationGuard,
        expiry: Expiry,
        recovery: Recovery,
        components: Components,
        measurements: Measurements,
        max_residents: int,
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._tracker = tracker
        self._guard = guard
        self._expiry = expiry
        self._recovery = recovery
        self._components = components
        self._measurements = measurements
        self._max_residents = max_residents
        self._wakes_ns: list[int] = []  # Times of `WakeAt` that have not been reached, ascending.

    def on_woke(self, now_ns: int) -> None:
        """Forget the wake-up times that have been reached."""
        self._wakes_ns = [at_ns for at_ns in self._wakes_ns if at_ns > now_ns]

    def plan(self, now_ns: int) -> list[Action]:
        """Ask the policy for a plan and commit it; returns the actions.

        If the guard starts promised jobs itself, they may leave room for others, so the policy is asked again. It is
        also asked again if a stop is held back.
        """
        actions = self._expiry.expire(now_ns)
        actions += self._use_slots(now_ns)
        for number in range(_MOST_PLANS):
            plan = self._policy.plan(self._tracker, self._costs, now_ns)
            while plan.dropped_to_best_effort or plan.failures:
                actions += self._give_up(plan)
                plan = self._policy.plan(self._tracker, self._costs, now_ns)
            actions += [] if plan.placement is None else [Place(plan.placement)]
            stopped, is_vetoed = self._stop(plan.stops, now_ns)
            actions += stopped
            if is_vetoed and number + 1 < _MOST_PLANS:
                continue  # The starts of the plan may count on the devices of these works.
            self._update_proof(now_ns)
            review = self._guard.review(plan.starts, self._tracker, self._costs, now_ns)
            actions += self._held_back(plan.starts, review.starts)
            actions += [action for start in review.starts for action in self._start(start)]
            self._tracker.reserve_all(review.blocks)
            self._update_proof(now_ns)
            forced = self._guard.forced(self._tracker, self._costs, now_ns)
            actions += [action for start in forced for action in self._start(start)]
            self._keep(self._tracker.jobs[job_id] for start in forced for job_id in start.job_ids)
            if not forced:
                actions += self._load_ahead(plan.loads, now_ns)
                actions += [one for read in plan.reads for one in self._components.read_ahead(read, now_ns)]
                break
        actions += self._measure(now_ns)
        unpark_ns = self._costs.forgets_ns if self._tracker.num_parked else None
        guard_ns = self._guard.wake_ns(self._tracker, now_ns)
        wakes_ns = (guard_ns, unpark_ns, self._expiry.wake_ns(), self._measurements.wake_ns(now_ns))
        return actions + self._wake(plan.wake_ns, *wakes_ns)

    def _use_slots(self, now_ns: int) -> list[Action]:
        """Start stages on CPU slots, except where that endangers the promise of an earlier job."""
        if not self._tracker.for_slots:
            return []
        self._update_proof(now_ns)
        actions: list[Action] = []
        for start in slot_starts(self._tracker):
            review = self._guard.review((start,), self._tracker, self._costs, now_ns)
            if not review.starts and self._guard.is_due_on_slot(start, self._tracker, self._costs, now_ns):
                actions += self._start(start)
                self._update_proof(now_ns)
                continue
            actions += self._held_back((start,), review.starts)
            actions += [action for one in review.starts for action in self._start(one)]
            self._tracker.reserve_all(review.blocks)
        return actions

    def _load_ahead(self, loads: Sequence[LoadAhead], now_ns: int) -> list[Action]:
        """Begin loads ahead of need on devices that are idle, except where that endangers a promise."""
        actions: list[Action] = []
        for load in loads:
            device = self._tracker.device(load.device_id)
            if device is None or device.works or device.is_loading:
                continue
            blocks = self._guard.review_load(load, self._tracker, self._costs, now_ns)
            if blocks is not None:
                actions += self._components.load_ahead(load)
                self._tracker.reserve_all(blocks)
        if actions:
            self._update_proof(now_ns)
        return actions

    def _measure(self, now_ns: int) -> list[Action]:
        """Give a waiting measurement devices, if that endangers no promise; begin it when they are idle."""
        groups = self._measurements.choices(now_ns)
        if groups:
            self._update_proof(now_ns)
        for group in groups:
            asked = self._measurements.asked
            blocks = self._guard.review_measurement(asked, group, self._tracker, self._costs, now_ns)
            if blocks is not None:
                self._measurements.take(group)
                self._tracker.reserve_all(blocks)
                break
        actions = self._measurements.begin()
        if actions:
            self._update_proof(now_ns)
        return actions

    def _give_up(self, plan: Plan) -> list[Action]:
        """End the jobs that the policy cannot serve, and drop to best effort those that it cannot serve in time.

        A job with a spare cache gets the cache instead; then the policy is asked again whether the job is in time.
        """
        actions: list[Action] = []
        for job_id, why in plan.failures:
            actions += self._recovery.end(self._tracker.jobs[job_id], Status.FAILED, why)
        for job_id, why in plan.dropped_to_best_effort:
            job = self._tracker.jobs[job_id]
            if job.may_use_cache:
                actions.append(self._expiry.use_cache(job, why))
                continue
            full = f"{why}, and no step is left for its cache" if job.request.spare_cache else why
            if job.request.is_dropped_if_late:
                actions += self._expiry.end(job, full)
                continue
            assert not job.dropped_to_best_effort, f"job {job_id} is dropped to best effort twice"
            delay_ns = self._tracker.delay_ns(job.request, dropped_to_best_effort=True)
            self._tracker.drop_to_best_effort(job, self._policy.urgency_ns(job.request, True, delay_ns), delay_ns)
            actions.append(DropToBestEffort(job_id, full))
        return actions

    def _stop(self, job_ids: Sequence[int], now_ns: int) -> tuple[list[Action], bool]:
        """Stop the works of jobs; those of a promised job, which then has more work left, only if a proof remains.

        Also returns whether works run on instead. These may not be stopped before they have made progress.
        """
        actions: list[Action] = []
        is_vetoed = False
        for job in map(self._tracker.jobs.__getitem__, job_ids):
            jobs = self._tracker.sharing(job)
            if not all(one.may_stop for one in jobs):
                continue
            blocks: Mapping[int, Block] = {}
            if any(one.promised is not None for one in jobs):
                boundary = self._tracker.boundary(jobs)
                self._update_proof(now_ns)
                reviewed = None
                if boundary is not None:
                    reviewed = self._guard.review_stop(boundary, self._tracker, self._costs, now_ns)
                if reviewed is None:
                    self._keep(jobs)
                    actions.append(HoldBack(job.job_id, is_start=False))
                    is_vetoed = True
                    continue
                blocks = reviewed
            actions += [Stop(work.work_id) for work in self._tracker.stop(jobs)]
            self._tracker.reserve_all(blocks)
        return actions, is_vetoed

    def _held_back(self, wanted: Sequence[Start], made: Sequence[Start]) -> list[Action]:
        """Record which jobs wait for promises, each once until it starts."""
        if len(made) == len(wanted):
            return []
        made_for = {job_id for start in made for job_id in start.job_ids}
        actions: list[Action] = []
        for job_id in dict.fromkeys(job_id for start in wanted for job_id in start.job_ids):
            job = self._tracker.jobs[job_id]
            if job_id not in made_for and not job.is_held_back:
                job.is_held_back = True
                actions.append(HoldBack(job_id, is_start=True))
        return actions

    @staticmethod
    def _keep(jobs: Iterable[Job]) -> None:
        """Let jobs run on until they have made progress."""
        for job in jobs:
            job.has_advanced = False

    def _update_proof(self, now_ns: int) -> None:
        """Let the guard update its proof."""
        self._tracker.reserve_all(self._guard.update(self._tracker, self._costs, now_ns))

    def _wake(self, *wanted_ns: int | None) -> list[Action]:
        """Ask for a wake-up at the earliest of these times, unless one is due by then."""
        at_ns = min([wanted for wanted in wanted_ns if wanted is not None], default=None)
        if at_ns is None or (self._wakes_ns and self._wakes_ns[0] <= at_ns):
            return []
        self._wakes_ns.insert(0, at_ns)
        return [WakeAt(at_ns)]

    def _start(self, start: Start) -> list[Action]:
        actions: list[Action] = []
        # This precedes the moves of states: some models call components when they get a state.
        requests = [self._tracker.jobs[job_id].request for job_id in start.job_ids]
        beside_bytes = self._costs.weights.activation_bytes(start.stage, requests, len(start.devices))
        if self._tracker.needs_preparation(start.devices, beside_bytes):
            actions = self._components.prepare(start, self._tracker.next_work_id, beside_bytes)
        actions += [move for job_id in start.job_ids for move in self._moves(job_id, start)]
        work = self._tracker.commit(start)
        for job_id in start.job_ids:
            job = self._tracker.jobs[job_id]
            self._tracker.residents.add(job, start.devices, job.committed.num_done)
        actions.append(RunWork(work))
        return actions + self._make_room(start.devices)

    def _moves(self, job_id: int, start: Start) -> list[Action]:
        """Move a job's state to the devices of a start that will lack it; targets that lack the same share a move."""
        job = self._tracker.jobs[job_id]
        moves: list[Action] = []
        if job.committed.position and start.devices != job.last_devices:
            needed = job.committed.itinerary.needed_from[job.committed.num_done]
            lacking: dict[tuple[int, ...], list[int]] = {}
            for device_id in start.devices:
                if device_id not in job.last_devices:
                    known = job.holders.get(device_id, 0)
                    lacking.setdefault(tuple([index for index in needed if index >= known]), []).append(device_id)
            moves = [MoveState(job_id, tuple(lacking[lacks]), lacks) for lacks in sorted(lacking, reverse=True)]
        return moves

    def _make_room(self, devices: Group) -> list[Action]:
        """Drop the jobs that have been idle longest from devices with too many residents. Their blobs are kept."""
        drops: list[Action] = []
        for device_id in devices:
            for job in self._tracker.residents.beyond(device_id, self._max_residents):
                self._tracker.residents.remove(job, device_id)
                drops.append(DropState(job.job_id, (device_id,)))
        return drops
