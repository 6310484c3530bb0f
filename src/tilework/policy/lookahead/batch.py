"""Several requests in one forward pass on one device: the end of each, and the time saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from tilework.core.graph.stage import Stage
from tilework.core.interfaces import JobView
from tilework.core.work import Start
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import StepTime
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.margin import Margin
from tilework.policy.toolkit.starts import before_steps, start_at_once, start_steps, steps_in_chunk

LEAST_SAVED = 0.1  # Of the time of a step apart. With less saved, requests that come later lose more than these gain.


@dataclass(frozen=True, slots=True)
class Member:
    """A request of a batch, with its work that is not committed yet; `forecast` includes works in flight.

    `due_ns` is inf for a request that need not be on time.
    """

    job: JobView
    forecast: JobForecast
    head_ns: float
    num_steps: int
    tail_ns: float
    due_ns: float = inf

    @staticmethod
    def of(job: JobView, forecast: JobForecast, margin: Margin, now_ns: int) -> Member:
        """A job as a member of a batch. A promised one must be on time with this margin."""
        left, due_ns = job.left, inf
        if forecast.claim is Claim.FEASIBLE:
            due_ns = forecast.due_ns if job.promised is None else margin.latest_ns(int(forecast.due_ns), now_ns)
        head_ns = forecast.head_ns if left.num_steps_left and left.stage != left.stepped else 0.0
        num_steps, tail_ns = left.num_steps, forecast.tail_ns
        tail_ns += (left.num_steps_left - num_steps) * forecast.speeds[0].step_ns  # Of later stages with steps.
        return Member(job, forecast, head_ns, num_steps, tail_ns, due_ns)

    @property
    def stage(self) -> Stage:
        """The stage of its steps; the last one with steps if it has none left."""
        stage = self.job.left.last_stepped
        assert stage is not None
        return stage

    @property
    def alone_ns(self) -> float:
        """The time that it takes alone on one device."""
        return self.head_ns + self.num_steps * self.forecast.speeds[0].step_ns + self.tail_ns


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that share the forward passes of one device from `ready_ns` on, each to the end of its `stage`.

    Stages without steps run one by one.
    """

    members: tuple[Member, ...]
    ready_ns: float
    step_time: StepTime
    _ends_ns: tuple[float, ...] | None = field(default=None, init=False)

    @property
    def stage(self) -> Stage:
        """The stage of all members."""
        return self.members[0].stage

    @property
    def ends_ns(self) -> tuple[float, ...]:
        """When each ends, in the order of the members: those with the fewest steps first, the others without them."""
        if self._ends_ns is None:
            now = self.ready_ns + sum(member.head_ns for member in self.members)
            ends, done = [0.0] * len(self.members), 0
            left = sorted(range(len(self.members)), key=lambda index: self.members[index].num_steps)
            while left:
                num_steps = self.members[left[0]].num_steps - done
                now += num_steps * self.step_time(self.stage, [self.members[index].job.request for index in left])
                done += num_steps
                while left and self.members[left[0]].num_steps == done:
                    index = left.pop(0)
                    now += self.members[index].tail_ns
                    ends[index] = now
            self._ends_ns = tuple(ends)
        return self._ends_ns

    @property
    def slack_ns(self) -> float:
        """The least time from a member's end to its deadline; negative if one is late."""
        pairs = zip(self.members, self.ends_ns, strict=True)
        return min((member.due_ns - end_ns for member, end_ns in pairs), default=inf)

    def keeps_promises(self, chunk_ns: int) -> bool:
        """Whether promised deadlines are kept even if the members run one by one after a chunk together.

        The reservation guard requires that, since it cannot know that they may continue together.
        """
        promised = [member for member in self.members if member.job.promised is not None]
        if not promised:
            return True
        step_ns = self.step_time(self.stage, [member.job.request for member in self.members])
        num_steps = max(1, int(chunk_ns // max(1.0, step_ns)))
        now = self.ready_ns + sum(member.head_ns for member in self.members) + num_steps * step_ns
        for member in sorted(promised, key=lambda member: member.due_ns):
            num_left = max(0, member.num_steps - num_steps)
            now += num_left * member.forecast.speeds[0].step_ns + member.tail_ns
            if now > member.due_ns:
                return False
        return True

    def with_(self, member: Member) -> Batch:
        return Batch((*self.members, member), self.ready_ns, self.step_time)

    def without(self, members: Iterable[Member]) -> Batch:
        gone = {member.job.job_id for member in members}
        kept = tuple(member for member in self.members if member.job.job_id not in gone)
        return Batch(kept, self.ready_ns, self.step_time)

    def saved(self, member: Member) -> float:
        """The share of a step's time that is saved if one more joins, compared with its running apart."""
        here = [each.job.request for each in self.members]
        if self.stage != member.stage:
            return 0.0
        apart_ns = self.step_time(self.stage, here) + member.forecast.speeds[0].step_ns
        return 1.0 - self.step_time(self.stage, [*here, member.job.request]) / apart_ns if apart_ns else 0.0

    def is_better_with(self, member: Member, otherwise_ns: float, num_behind: float) -> bool:
        """Whether the requests that need not be on time end earlier in the mean if one more joins.

        Otherwise it could begin alone at `otherwise_ns`; `num_behind` others wait for the device after it.
        """
        joined = self.with_(member)
        pairs = zip(self.members, self.ends_ns, joined.ends_ns, strict=False)
        loss_ns = sum(after_ns - before_ns for each, before_ns, after_ns in pairs if each.due_ns == inf)
        gain_ns = otherwise_ns + member.alone_ns - joined.ends_ns[-1] if member.due_ns == inf else 0.0
        saved_ns = max(self.ends_ns) + member.alone_ns - max(joined.ends_ns)
        return loss_ns <= gain_ns + num_behind * saved_ns

    def trimmed(self) -> Batch:
        """The batch without its longest members, so that the others fit into memory and are on time."""
        batch = self
        while len(batch.members) > 1 and (max(batch.ends_ns) == inf or batch.slack_ns < 0):
            batch = batch.without([max(batch.members, key=lambda member: (member.num_steps, member.job.job_id))])
        return batch

    def split(self) -> tuple[Batch, Batch]:
        """Two batches, of which the second goes to another device.

        It consists of the members to which fewer works are committed, since they have been left out before; if there
        are none, of every other member by remaining time.
        """
        last_id = max(member.job.works[-1].work_id if member.job.works else 0 for member in self.members)
        leaving = [member for member in self.members if member.job.works and member.job.works[-1].work_id < last_id]
        if leaving:
            staying = self.without(leaving)
            return staying, self.without(staying.members)
        order = sorted(self.members, key=lambda member: (member.alone_ns, member.job.job_id), reverse=True)
        return self.without(order[1::2]), self.without(order[::2])

    def as_forecast(self, now_ns: int, may_split: bool) -> JobForecast:
        """The batch as one job of a rollout. It is on time if all members that must be are on time.

        With `may_split` it may have two devices, on which it runs as two batches.
        """
        feasible = [member for member in self.members if member.due_ns < inf]
        one_ns = max(self.ends_ns) - self.ready_ns
        speeds = [Speed(1, round(one_ns))]
        if may_split and len(self.members) > 1:
            two_ns = max(max(half.ends_ns) - half.ready_ns for half in self.split())
            speeds += [Speed(2, round(two_ns))] if two_ns < one_ns else []
        first = min(self.members, key=lambda member: (member.forecast.claim, member.forecast.order_key))
        due_ns = max(self.ends_ns) + self.slack_ns if feasible else inf
        return JobForecast(
            job_id=self.members[0].job.job_id,
            claim=Claim.FEASIBLE if feasible else first.forecast.claim,
            order_key=due_ns if feasible else first.forecast.order_key,
            due_ns=due_ns,
            speeds=tuple(speeds),
            usual=0,
            num_steps=1.0,
            head_ns=self.ready_ns - now_ns,
            tail_ns=0.0,
            weight=sum(member.forecast.weight for member in self.members),
        )

    def starts(self, device_id: int, num_chunks: int, most_steps: int, chunk_ns: int, why: str) -> Iterator[Start]:
        """The next chunks of steps, and the stages without steps: before them, and of members that have made theirs."""
        lefts = {member.job.job_id: member.job.left for member in self.members}
        ended = [job_id for job_id, left in lefts.items() if not left.num_steps_left]
        begin = [job_id for job_id in lefts if job_id not in ended] if num_chunks and most_steps else []
        for job_id in ended + begin:
            yield from start_at_once(lefts[job_id], job_id, device_id, why)
        done = 0
        for _ in range(num_chunks):
            sharing = [member for member in self.members if member.num_steps > done]
            if not sharing or done == most_steps:
                return
            step_ns = self.step_time(self.stage, [member.job.request for member in sharing])
            least = min(member.num_steps for member in sharing)
            num_steps = steps_in_chunk(min(least, most_steps) - done, step_ns, chunk_ns)
            done += num_steps
            job_ids, others = tuple(member.job.job_id for member in sharing), _others(len(sharing) - 1)
            yield start_steps(self.stage, job_ids, (device_id,), num_steps, why + others)
            for job_id in (member.job.job_id for member in sharing if member.num_steps == done):
                left = before_steps(lefts[job_id])
                yield from start_at_once(left.advanced(left.num_left_here), job_id, device_id, why)


def _others(num_others: int) -> str:
    return f"; {num_others} other{'s' if num_others > 1 else ''} in the same batch" if num_others else ""
