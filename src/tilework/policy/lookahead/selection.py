"""Whom a node serves, in which order and together with whom, by looking ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilework.core.interfaces import DeviceView, JobView
from tilework.core.work import DIFFUSE, Group, Work
from tilework.policy.lookahead.batch import WORTH, Batch, Member, StepTime
from tilework.policy.lookahead.rollout import Claim, Outlook, Ride, roll
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.margin import ADMISSION_MARGIN, GUARD_MARGIN, Margin
from tilework.policy.toolkit.order import doom

ONE_DEVICE = Speed(1, 0)
CHUNKS = 2  # Told to a group at a time, so that it never waits for the controller.
_MOST_TRIED = 6  # Of those who could share their steps, and of those whose steps they could share.
_MOST_REFUSED = 8  # In a row, until those behind them are not tried any more.


@dataclass(slots=True)
class Service:
    """The order of service of a node. `rides` are those of the jobs that it serves or may serve, in any order.

    `roll` says what comes of an order of service if nobody else arrives. Jobs go by deadline; if one of them is late
    then, the one with the most left to do per weight, of those up to the late one, is *spared* (as in Moore and
    Hodgson's rule for one machine, with GPU-time for time) and comes behind all that are due; and so on until nobody is
    late. Whoever is spared gets what is left over, and is looked at anew at the next occasion.

    Whoever is left without a device then may share the steps of somebody who has one: see `pool`. `step_time` says
    what they take together. To `roll` a batch is one ride.
    """

    devices: Sequence[DeviceView]
    now_ns: int
    chunk_ns: int
    step_time: StepTime
    calm_ns: float = inf
    jobs: dict[int, JobView] = field(default_factory=dict)
    rides: list[Ride] = field(default_factory=list)
    order: list[Ride] = field(default_factory=list)  # Of service, as of the latest choice.
    batches: dict[Ride, Batch] = field(default_factory=dict)  # By their rides.
    leaving: set[int] = field(default_factory=set)  # Jobs that are to stop and go on at another node.
    _outlook: Outlook | None = None  # Of this order; None if another must be chosen.
    _served: list[Ride] = field(default_factory=list)  # All, those that share a device as one.

    def add(self, job: JobView, ride: Ride) -> None:
        self.jobs[job.job_id] = job
        self.rides.append(ride)
        self._outlook = None

    def drop(self, job_id: int) -> None:
        """It is served elsewhere."""
        if self.jobs.pop(job_id, None) is not None:
            self.rides = [ride for ride in self.rides if ride.job_id != job_id]
            self._outlook = None

    def keeps_all_with(self, ride: Ride) -> bool:
        """Whether another one would be on time, and nobody late for it who is not so anyway."""
        self.choose()
        return roll(sorted([*self.order, ride], key=_order), len(self.devices), self.now_ns, self.calm_ns).late is None

    def ready_ns(self, job: JobView) -> int:
        """When the works of a job have ended; now if it has none."""
        if not job.works:
            return self.now_ns
        return max(self.now_ns, self.end_ns(job.works[-1]))

    def end_ns(self, work: Work) -> int:
        """When a work is predicted to end."""
        return max(
            [
                device.end_ns(work)
                for device in self.devices
                if device.device_id in work.devices and work in device.works
            ],
            default=0,
        )

    # Whom to serve.

    def doomed(self) -> list[tuple[int, str]]:
        """Whom nothing would bring in on time, and why."""
        found = [(ride, doom(self.jobs[ride.job_id], self.now_ns + int(ride.least_ns))) for ride in self.rides]
        return [(ride.job_id, why) for ride, why in found if why is not None]

    def choose(self) -> Outlook:
        """Put rides in order of service, and spare as few of them as possible; says what comes of it.

        Before somebody is spared who cannot share the steps of another, those do who can, if that makes room.
        """
        if self._outlook is not None:
            return self._outlook
        for ride in self.rides:
            if ride.claim is Claim.SPARED:
                ride.claim = Claim.DUE
        self._served = self._gathered()
        outlook = self._roll_all()
        spared: list[Ride] = []
        while (late := outlook.late) is not None:
            rivals = [ride for ride in self.order[: late + 1] if ride.claim is Claim.DUE]
            victim = max(reversed(rivals), key=_value)
            if not self._may_board(victim, Claim.DUE) and (relieved := self._make_room(late)) is not None:
                outlook = relieved
                continue
            victim.claim = Claim.SPARED
            spared.append(victim)
            outlook = self._roll_all()
        for ride in sorted(spared[:-1], key=_value):
            ride.claim = Claim.DUE
            order, with_it = self._roll(self._served)
            if with_it.late is None:
                self.order, outlook = order, with_it
            else:
                ride.claim = Claim.SPARED
        self._outlook = outlook
        return outlook

    def _roll_all(self) -> Outlook:
        self.order, outlook = self._roll(self._served)
        return outlook

    def _roll(self, rides: Sequence[Ride]) -> tuple[list[Ride], Outlook]:
        order = sorted([*self._fixed(), *rides], key=_order)
        return order, roll(order, len(self.devices), self.now_ns, self.calm_ns)

    def _gathered(self) -> list[Ride]:
        """The rides of all; those that share a device are one, without whoever would make somebody late.

        He is left to what he has been told, and goes elsewhere after it.
        """
        self.batches = {}
        aboard: set[int] = set()
        rides: list[Ride] = []
        batches: list[Batch] = []
        by_id = {ride.job_id: ride for ride in self.rides}
        for device in self.devices:
            told = dict.fromkeys(job_id for work in device.works for job_id in work.job_ids)
            here = [self.jobs[job_id] for job_id in told if job_id in by_id]
            if not _is_shared(device, here, by_id):
                continue
            staying = [job for job in here if not job.is_stopping]
            aboard.update(job.job_id for job in staying)
            members = [self._member(job, by_id[job.job_id], GUARD_MARGIN) for job in staying if job.stage is not None]
            whole = Batch(tuple(members), device.free_ns, self.step_time)
            unfit = [member for member in whole.members if not member.job.may_share]
            batch = whole.without(unfit if len(unfit) < len(whole.members) else unfit[1:]).trimmed()
            if batch.members:
                batches.append(batch)
            else:
                rides.append(self._busy(device))
            kept = {member.job.job_id for member in batch.members}
            for member in whole.members:
                if member.job.job_id not in kept:
                    head_ns = device.free_ns - self.now_ns + member.encode_ns
                    rides.append(
                        replace(member.ride, head_ns=head_ns, rank=-1, hold_ns=0.0, num_steps=member.num_steps)
                    )
        rides += (ride for ride in self.rides if ride.job_id not in aboard)
        may_split = len(rides) + len(batches) < len(self.devices)
        return rides + [self._as_ride(batch, may_split) for batch in batches]

    def _member(self, job: JobView, ride: Ride, margin: Margin = ADMISSION_MARGIN) -> Member:
        return Member.of(job, ride, margin, self.now_ns)

    def _as_ride(self, batch: Batch, may_split: bool = False) -> Ride:
        ride = batch.as_ride(self.now_ns, may_split)
        self.batches[ride] = batch
        return ride

    def spared(self) -> list[tuple[JobView, Ride]]:
        """Whose deadlines are given up here though they may still go elsewhere, and what is left of them."""
        pairs = [(self.jobs[ride.job_id], ride) for ride in self.rides if ride.claim is Claim.SPARED]
        return [(job, ride) for job, ride in pairs if not job.works or job.may_stop]

    def need(self) -> int:
        """How many devices those need now who are on time."""
        return min(len(self.devices), sum(need_of(ride, self.now_ns) for ride in self._served))

    def _fixed(self) -> Iterator[Ride]:
        """Devices that are left to what they do, since it cannot be changed any more."""
        for device in self.devices:
            if device.works and not any(job_id in self.jobs for work in device.works for job_id in work.job_ids):
                yield self._busy(device)

    def _busy(self, device: DeviceView) -> Ride:
        """A device until the works that it has been told have ended."""
        return Ride(-1, Claim.FIXED, inf, (ONE_DEVICE,), 0, 0.0, float(device.free_ns - self.now_ns), 0.0)

    # Who shares a device.

    def _make_room(self, late: int) -> Outlook | None:
        """Let some who wait share the steps of others, so that the first who is late comes later; None: no use."""
        before, due_ns = (self.order, self._served), self.order[late].due_ns
        waiting = [ride for ride in self.order[: late + 1] if self._may_board(ride, Claim.DUE)]
        for ride in waiting[-_MOST_TRIED:]:
            if ride not in self.order:  # Somebody shares its steps by now.
                continue
            member = self._member(self.jobs[ride.job_id], ride)
            hosts = [other for other in self.order if other.claim is Claim.DUE and other is not ride]
            for order, served, after in self._boarded(member, hosts, 0.0, 0.0):
                first_ns = inf if after.late is None else order[after.late].due_ns
                if first_ns >= due_ns:
                    self.order, self._served = order, served
                    if first_ns > due_ns:
                        return after
                    break
        self.order, self._served = before
        return None

    def pool(self) -> Outlook:
        """Let those who have no device share the steps of others, if time of the device is saved and nobody late by it.

        Whoever was to be late may be on time that way, those first who take least; who cannot be slows nobody who can.
        Of those who need not be on time, some are done later and some earlier: the latter must outweigh.
        """
        outlook = self.choose()
        if not any(ride.shares and self._awaits_steps(ride) for ride in self._served):
            return outlook
        boarding = [
            ride
            for ride, degree in zip(self.order, outlook.degrees, strict=True)
            if not degree and self._may_board(ride, ride.claim)
        ]
        boarding.sort(key=lambda ride: (ride.claim, _value(ride) if ride.claim is Claim.SPARED else 0.0))
        num_refused = 0
        for index, ride in enumerate(boarding):
            if ride not in self.order or outlook.degrees[self.order.index(ride)]:  # By now it has a device.
                continue
            num_behind = (len(boarding) - index - 1) / len(self.devices)
            as_due = replace(ride, claim=Claim.DUE) if ride.claim is Claim.SPARED else ride
            member = self._member(self.jobs[ride.job_id], as_due)
            found = self._board(member, outlook, num_behind)
            num_refused = num_refused + 1 if found is None else 0
            outlook = found or outlook
            if num_refused == _MOST_REFUSED:
                break
        return outlook

    def _board(self, member: Member, outlook: Outlook, num_behind: float) -> Outlook | None:
        """Let one share the steps of whoever saves most by it; what comes of it, None if there is nobody."""
        pairs = zip(self.order, outlook.degrees, strict=True)
        hosts = [ride for ride, degree in pairs if degree == 1 and self._awaits_steps(ride)]
        otherwise_ns = outlook.next_ns if outlook.next_ns < inf else float(self.now_ns)
        for order, served, after in self._boarded(member, hosts, otherwise_ns, num_behind):
            if after.late is None and after.degrees[order.index(served[0])] == 1:
                self.order, self._served, self._outlook = order, served, after
                return after
        return None

    def _awaits_steps(self, ride: Ride) -> bool:
        """Whether it is to be told its next steps now: there is no hurry to decide with whom it makes later ones."""
        batch = self.batches.get(ride)
        jobs = [self.jobs.get(ride.job_id)] if batch is None else [member.job for member in batch.members]
        return all(job is not None and num_chunks(job) < CHUNKS for job in jobs)

    def _may_board(self, ride: Ride, claim: Claim) -> bool:
        """Whether it waits, and might save time together with others."""
        if not ride.shares or ride.claim is not claim or ride in self.batches:
            return False
        job = self.jobs.get(ride.job_id)
        return job is not None and not job.works and bool(job.num_steps_left)

    def _boarded(
        self, member: Member, hosts: Sequence[Ride], otherwise_ns: float, num_behind: float
    ) -> Iterator[tuple[list[Ride], list[Ride], Outlook]]:
        """What comes of one's sharing the steps of some of these, those first who save most: order, rides, outlook.

        The batch is the first of the rides.
        """
        open_batches = [(batch, ride) for ride in hosts if (batch := self._open_batch(ride)) is not None]
        saved = [(batch.saved(member), -index) for index, (batch, _) in enumerate(open_batches)]
        for share, rank in sorted(saved, reverse=True)[:_MOST_TRIED]:
            batch, host = open_batches[-rank]
            joined = batch.with_(member)
            if share < WORTH or joined.slack_ns < 0 or not batch.is_better_with(member, otherwise_ns, num_behind):
                continue
            if not joined.keeps_promises(self.chunk_ns) or (member.job.dropped_to_best_effort and batch.slack_ns < inf):
                continue
            ride = self._as_ride(joined)
            gone = host.job_id, member.job.job_id
            served = [ride, *(each for each in self._served if each.job_id not in gone)]
            order, after = self._roll(served)
            yield order, served, after

    def _open_batch(self, ride: Ride) -> Batch | None:
        """The batch of those who share this ride's device, which another may join; None if nobody can."""
        batch = self.batches.get(ride)
        if batch is not None:
            return batch if all(member.job.may_share for member in batch.members) else None
        job = self.jobs.get(ride.job_id)
        if job is None or not ride.shares or job.is_stopping or not job.num_steps_left:
            return None
        if job.job_id in self.leaving or (job.works and len(group_of(job)) > 1):
            return None
        return Batch((self._member(job, ride),), float(self.ready_ns(job)), self.step_time)


def _is_shared(device: DeviceView, jobs: Sequence[JobView], rides: Mapping[int, Ride]) -> bool:
    """Whether several of these jobs make steps on a device, or are about to."""
    if any(len(work.job_ids) > 1 for work in device.works):
        return True
    return len(jobs) > 1 and all(rides[job.job_id].shares and len(job.last_devices) == 1 for job in jobs)


def num_chunks(job: JobView) -> int:
    """How many pieces of steps it has been told and not ended."""
    return sum(work.stage.name == DIFFUSE for work in job.works)


def group_of(job: JobView) -> Group:
    """The devices that it runs its steps on."""
    return max([work.devices for work in job.works], key=len)


def _order(ride: Ride) -> tuple[int, float, int]:
    return ride.claim, ride.due_ns, ride.job_id


def _value(ride: Ride) -> float:
    """What it costs to serve it."""
    return ride.least_device_ns / ride.weight


def need_of(ride: Ride, now_ns: int) -> int:
    """How many devices it needs now: the fewest with which it is on time."""
    if ride.claim is Claim.DUE:
        budget_ns = ride.due_ns - now_ns - ride.head_ns - ride.tail_ns
        in_time = (speed.degree for speed in ride.speeds if ride.num_steps * speed.step_ns <= budget_ns)
        return next(in_time, ride.speeds[-1].degree)
    return ride.speeds[ride.usual].degree if ride.claim < Claim.DUE else 0
