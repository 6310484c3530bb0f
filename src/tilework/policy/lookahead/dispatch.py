"""What one node does next, by looking ahead: who gets how many of its devices, and who makes room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from tilework.core.interfaces import JobView
from tilework.core.progress import Cursor
from tilework.core.work import DIFFUSE, Group, Start
from tilework.policy.lookahead.batch import Batch
from tilework.policy.lookahead.rollout import Claim, Ride
from tilework.policy.lookahead.selection import CHUNKS, Service, group_of, need_of, num_chunks
from tilework.policy.toolkit.buddy_allocator import Allocator
from tilework.policy.toolkit.order import explain

_ALL = 1 << 30


@dataclass(slots=True)
class Lookahead(Service):
    """The plan of a node: the first moment of what `Service` foresees.

    A job whose degree changes stops at its next step boundary and goes on in its new group; one that could be wider
    goes on as it is until the devices are idle. Two rules keep steps, which cannot be interrupted, from being in the
    way of the next change that is foreseen: whoever is to get more devices then waits for these if that is quicker than
    another step on few; and who has no deadline begins no step that would not be over, if others are to have its
    devices then.
    """

    starts: list[Start] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    _allocator: Allocator = field(init=False)

    def carry_out(self) -> None:
        """Say what is to be started and stopped."""
        outlook = self.pool()
        self._allocator = Allocator([[device.device_id for device in self.devices if not device.works]])
        for ride, degree, then in zip(self.order, outlook.degrees, outlook.then, strict=True):
            job = self.jobs.get(ride.job_id)
            if job is None:
                continue
            if ride in self.batches:
                self._serve(self.batches[ride], ride, degree, then)
            elif not job.works:
                self._begin(job, ride, degree, then)
            elif _shares(job):
                self._hold(degree)
            elif job.is_stopping:
                self._hold(degree - len(group_of(job)))
            else:
                self._go_on(job, ride, degree, then)

    def _serve(self, batch: Batch, ride: Ride, degree: int, then: int) -> None:
        """Begin a batch or tell it its next chunks, at whose end the others may have the device.

        Half of it leaves where a device is idle.
        """
        running = [member.job for member in batch.members if member.job.works]
        if not degree:
            return
        if degree > 1 and self._allocator.num_free():
            batch = batch.split()[0]
            self._hold(1)
        group: Group | None = running[0].last_devices if running else self._allocator.take(1, ())
        if group is None:
            self._hold(1)
            return
        step_ns = round(self.step_time([member.job.request for member in batch.members]))
        most = self._most_steps(ride, 1, step_ns, int(batch.ready_ns), min(then, 1))
        num_new = CHUNKS - max(map(num_chunks, running), default=0)
        self.starts += batch.starts(group[0], max(0, num_new), most, self.chunk_ns, "gets 1 GPU")

    def _begin(self, job: JobView, ride: Ride, degree: int, then: int) -> None:
        if not degree:
            return
        group = self._allocator.take(degree, job.last_devices)
        if group is None and ride.claim is Claim.DUE:
            least, room = need_of(ride, self.now_ns), self._allocator.num_free()
            fitting = [speed.degree for speed in ride.speeds if least <= speed.degree <= room]
            group = self._allocator.take(fitting[-1], job.last_devices) if fitting else None
        if group is None:
            self._hold(degree)
        else:
            self.starts += self._pieces(job, ride, group, CHUNKS, then)

    def _go_on(self, job: JobView, ride: Ride, degree: int, then: int) -> None:
        """Change the degree of a running job, or tell it its next chunk."""
        group = group_of(job)
        extra = degree - len(group)
        if job.job_id in self.leaving:
            self.stops.append(job.job_id)
        elif job.may_stop and (extra < 0 or 0 < extra <= self._allocator.num_free()):
            self.stops.append(job.job_id)
            self._hold(extra)
        else:
            self.starts += self._pieces(job, ride, group, max(0, CHUNKS - num_chunks(job)), then)

    def _hold(self, width: int) -> None:
        """Leave idle devices to somebody who waits for others to become idle."""
        if width > 0:
            self._allocator.take_some([device.device_id for device in self.devices], width)

    def _pieces(self, job: JobView, ride: Ride, group: Group, most_chunks: int, then: int) -> Iterator[Start]:
        """Encode if it is due, chunks of steps on the group, and decode behind the last of them."""
        cursor, why = Cursor(job.stage, job.num_steps_left), explain(job, _verb(ride, len(group)), self.now_ns)
        step_ns = next((speed.step_ns for speed in ride.speeds if speed.degree == len(group)), 0)
        begin_ns = self.ready_ns(job) if job.works else self.now_ns + int(ride.head_ns)
        most = self._most_steps(ride, len(group), step_ns, begin_ns, then)
        if most == 0:
            return
        while cursor.stage is not None:
            num_steps = 1
            if cursor.stage.name == DIFFUSE:
                if not most_chunks or not most:
                    return
                num_steps = min(cursor.num_steps_left, most, max(1, self.chunk_ns // max(1, step_ns)))
                most_chunks, most = most_chunks - 1, most - num_steps
            devices = group if cursor.stage.name == DIFFUSE else group[:1]
            yield Start(stage=cursor.stage, job_ids=(job.job_id,), devices=devices, num_steps=num_steps, why=why)
            cursor = cursor.advanced(num_steps)

    def _most_steps(self, ride: Ride, degree: int, step_ns: int, begin_ns: int, then: int) -> int:
        """How many steps it may begin now at this degree, with regard to the next change that is foreseen."""
        next_ns = self.choose().next_ns
        if not step_ns or then == degree or next_ns == inf:
            return _ALL
        room_ns = next_ns - begin_ns
        if room_ns >= step_ns:
            return int(room_ns // step_ns)
        if then > degree:
            wide_ns = next(speed.step_ns for speed in ride.speeds if speed.degree == then)
            return 0 if room_ns < step_ns - wide_ns else 1
        is_needed = ride.claim > Claim.DUE and any(other.claim is Claim.DUE for other in self.rides)
        return 0 if is_needed else 1


def _shares(job: JobView) -> bool:
    return any(len(work.job_ids) > 1 for work in job.works)


def _verb(ride: Ride, degree: int) -> str:
    devices = "1 GPU" if degree == 1 else f"{degree} GPUs"
    match ride.claim:
        case Claim.DUE:
            return f"is on time with {devices}"
        case Claim.SPARED:
            return f"gets {devices} that nobody else needs; to be on time it would have to take others' deadlines"
        case _:
            return f"gets {devices}"
