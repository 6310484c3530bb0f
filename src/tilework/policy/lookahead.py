"""What one node does next, by looking ahead: who gets how many of its devices, and who makes room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from tilework.core.interfaces import GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.work import DIFFUSE, Group, Start, Work
from tilework.policy.allocator import Allocator
from tilework.policy.demand import Speed
from tilework.policy.foresight import Claim, Outlook, Ride, roll
from tilework.policy.order import doom, explain

ONE_DEVICE = Speed(1, 0)
_CHUNKS = 2  # Told to a group at a time, so that it never waits for the controller.


@dataclass(slots=True)
class Lookahead:
    """The plan of a node. `rides` are those of the jobs that it serves or may serve, in any order, with their jobs.

    Theory of operation. `roll` says what comes of an order of service if nobody else arrives. Jobs go by deadline; if
    one of them is late then, the one with the most left to do per weight, of those up to the late one, is *spared* (as
    in Moore and Hodgson's rule for one machine, with GPU-time for time) and comes behind all that are due; and so on
    until nobody is late. Whoever is spared gets what is left over, and is looked at anew at the next occasion.

    Of that, only the first moment is carried out. A job whose degree changes stops at its next step boundary and goes
    on in its new group; one that could be wider goes on as it is until the devices are idle. Two rules keep steps,
    which cannot be interrupted, from being in the way of the next change that is foreseen: whoever is to get more
    devices then waits for these if that is quicker than another step on few; and who has no deadline begins no step
    that would not be over, if others are to have its devices then.
    """

    gpus: Sequence[GpuView]
    now_ns: int
    chunk_ns: int
    calm_ns: float = inf
    jobs: dict[int, JobView] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    rides: list[Ride] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)  # Jobs that are to stop and go on at another node.
    _order: list[Ride] = field(default_factory=list)
    _outlook: Outlook | None = None  # Of this order; None if another must be chosen.
    _allocator: Allocator = field(init=False)

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
        return roll(sorted([*self._order, ride], key=_order), len(self.gpus), self.now_ns, self.calm_ns).late is None

    def ready_ns(self, job: JobView) -> int:
        """When the works of a job have ended; now if it has none."""
        if not job.works:
            return self.now_ns
        return max(self.now_ns, self.end_ns(job.works[-1]))

    def end_ns(self, work: Work) -> int:
        """When a work is predicted to end."""
        return max([gpu.end_ns(work) for gpu in self.gpus if gpu.gpu in work.gpus and work in gpu.works], default=0)

    # Whom to serve.

    def doomed(self) -> list[tuple[int, str]]:
        """Whom nothing would bring in on time, and why."""
        found = [(ride, doom(self.jobs[ride.job_id], self.now_ns + int(ride.least_ns))) for ride in self.rides]
        return [(ride.job_id, why) for ride, why in found if why is not None]

    def choose(self) -> Outlook:
        """Put rides in order of service, and spare as few of them as possible; says what comes of it."""
        if self._outlook is not None:
            return self._outlook
        for ride in self.rides:
            if ride.claim is Claim.SPARED:
                ride.claim = Claim.DUE
        order, outlook = self._roll()
        spared: list[Ride] = []
        while outlook.late is not None:
            rivals = [ride for ride in order[: outlook.late + 1] if ride.claim is Claim.DUE]
            victim = max(reversed(rivals), key=_value)
            victim.claim = Claim.SPARED
            spared.append(victim)
            order, outlook = self._roll()
        for ride in sorted(spared[:-1], key=_value):
            ride.claim = Claim.DUE
            with_it = self._roll()
            if with_it[1].late is None:
                order, outlook = with_it
            else:
                ride.claim = Claim.SPARED
        self._order, self._outlook = order, outlook
        return outlook

    def _roll(self) -> tuple[list[Ride], Outlook]:
        order = sorted([*self._fixed(), *self.rides], key=_order)
        return order, roll(order, len(self.gpus), self.now_ns, self.calm_ns)

    def spared(self) -> list[tuple[JobView, Ride]]:
        """Whose deadlines are given up here though they may still go elsewhere, and what is left of them."""
        pairs = [(self.jobs[ride.job_id], ride) for ride in self.rides if ride.claim is Claim.SPARED]
        return [(job, ride) for job, ride in pairs if not job.works or job.may_stop]

    def need(self) -> int:
        """How many devices those need now who are on time."""
        return min(len(self.gpus), sum(_need(ride, self.now_ns) for ride in self.rides))

    def _fixed(self) -> Iterator[Ride]:
        """Devices that are left to what they do, since it cannot be changed any more."""
        for gpu in self.gpus:
            if gpu.works and not any(job_id in self.jobs for work in gpu.works for job_id in work.job_ids):
                yield Ride(-1, Claim.FIXED, inf, (ONE_DEVICE,), 0, 0.0, float(gpu.free_ns - self.now_ns), 0.0)

    # What to do for it now.

    def carry_out(self) -> None:
        """Say what is to be started and stopped."""
        outlook = self.choose()
        self._allocator = Allocator([[gpu.gpu for gpu in self.gpus if not gpu.works]])
        for ride, degree, then in zip(self._order, outlook.degrees, outlook.then, strict=True):
            job = self.jobs.get(ride.job_id)
            if job is None:
                continue
            if not job.works:
                self._begin(job, ride, degree, then)
            elif job.is_stopping:
                self._hold(degree - len(_group(job)))
            else:
                self._go_on(job, ride, degree, then)

    def _begin(self, job: JobView, ride: Ride, degree: int, then: int) -> None:
        if not degree:
            return
        group = self._allocator.take(degree, job.last_gpus)
        if group is None and ride.claim is Claim.DUE:
            least, room = _need(ride, self.now_ns), self._allocator.num_free()
            fitting = [speed.degree for speed in ride.speeds if least <= speed.degree <= room]
            group = self._allocator.take(fitting[-1], job.last_gpus) if fitting else None
        if group is None:
            self._hold(degree)
        else:
            self.starts += self._pieces(job, ride, group, _CHUNKS, then)

    def _go_on(self, job: JobView, ride: Ride, degree: int, then: int) -> None:
        """Change the degree of a running job, or tell it its next chunk."""
        group = _group(job)
        extra = degree - len(group)
        if job.job_id in self.leaving:
            self.stops.append(job.job_id)
        elif job.may_stop and (extra < 0 or 0 < extra <= self._allocator.num_free()):
            self.stops.append(job.job_id)
            self._hold(extra)
        else:
            num_chunks = sum(work.stage.name == DIFFUSE for work in job.works)
            self.starts += self._pieces(job, ride, group, max(0, _CHUNKS - num_chunks), then)

    def _hold(self, width: int) -> None:
        """Leave idle devices to somebody who waits for others to become idle."""
        if width > 0:
            self._allocator.take_some([gpu.gpu for gpu in self.gpus], width)

    def _pieces(self, job: JobView, ride: Ride, group: Group, num_chunks: int, then: int) -> Iterator[Start]:
        """Encode if it is due, chunks of steps on the group, and decode behind the last of them."""
        cursor, why = Cursor(job.stage, job.num_steps_left), explain(job, _verb(ride, len(group)), self.now_ns)
        step_ns = next((speed.step_ns for speed in ride.speeds if speed.degree == len(group)), 0)
        most = self._most_steps(job, ride, len(group), step_ns, then)
        if most == 0:
            return
        while cursor.stage is not None:
            num_steps = 1
            if cursor.stage.name == DIFFUSE:
                if not num_chunks or not most:
                    return
                num_steps = min(cursor.num_steps_left, most, max(1, self.chunk_ns // max(1, step_ns)))
                num_chunks, most = num_chunks - 1, most - num_steps
            gpus = group if cursor.stage.name == DIFFUSE else group[:1]
            yield Start(stage=cursor.stage, job_ids=(job.job_id,), gpus=gpus, num_steps=num_steps, why=why)
            cursor = cursor.advanced(num_steps)

    def _most_steps(self, job: JobView, ride: Ride, degree: int, step_ns: int, then: int) -> int:
        """How many steps it may begin now at this degree, with regard to the next change that is foreseen."""
        next_ns = self.choose().next_ns
        if not step_ns or then == degree or next_ns == inf:
            return job.num_steps_left + 1
        begin_ns = self.ready_ns(job) if job.works else self.now_ns + ride.head_ns
        room_ns = next_ns - begin_ns
        if room_ns >= step_ns:
            return int(room_ns // step_ns)
        if then > degree:
            wide_ns = next(speed.step_ns for speed in ride.speeds if speed.degree == then)
            return 0 if room_ns < step_ns - wide_ns else 1
        is_needed = ride.claim > Claim.DUE and any(other.claim is Claim.DUE for other in self.rides)
        return 0 if is_needed else 1


def _group(job: JobView) -> Group:
    """The devices that it runs its steps on."""
    return max([work.gpus for work in job.works], key=len)


def _order(ride: Ride) -> tuple[int, float, int]:
    return ride.claim, ride.due_ns, ride.job_id


def _value(ride: Ride) -> float:
    """What it costs to serve it."""
    return ride.least_gpu_ns / ride.weight


def _need(ride: Ride, now_ns: int) -> int:
    """How many devices it needs now: the fewest with which it is on time."""
    if ride.claim is Claim.DUE:
        budget_ns = ride.due_ns - now_ns - ride.head_ns - ride.tail_ns
        in_time = (speed.degree for speed in ride.speeds if ride.num_steps * speed.step_ns <= budget_ns)
        return next(in_time, ride.speeds[-1].degree)
    return ride.speeds[ride.usual].degree if ride.claim < Claim.DUE else 0


def _verb(ride: Ride, degree: int) -> str:
    gpus = "1 GPU" if degree == 1 else f"{degree} GPUs"
    match ride.claim:
        case Claim.DUE:
            return f"is on time with {gpus}"
        case Claim.SPARED:
            return f"gets {gpus} that nobody else needs; to be on time it would have to take others' deadlines"
        case _:
            return f"gets {gpus}"
