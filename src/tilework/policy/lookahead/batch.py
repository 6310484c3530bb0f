"""Several requests in one forward pass on one device: the end of each, and the time saved."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.policy import JobView
from tilework.core.request import Shape
from tilework.core.time import Margin
from tilework.core.work import Start
from tilework.cost.demand import Speed
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import StepTime
from tilework.policy.toolkit.starts import before_steps, start_at_once, start_stage, start_steps, steps_in_chunk

LEAST_SAVED = 0.1  # Share of a run apart. With less saved, requests that come later lose more than these gain.


@dataclass(frozen=True, slots=True, eq=False)
class BatchMember:
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
    def of(job: JobView, forecast: JobForecast, margin: Margin, now_ns: int) -> BatchMember:
        """Return a job as a member of a batch. A promised one must be on time with this margin."""
        left = job.left
        due_ns = inf
        if forecast.claim is Claim.FEASIBLE:
            due_ns = forecast.due_ns if job.promised is None else margin.latest_ns(int(forecast.due_ns), now_ns)
        head_ns = forecast.head_ns if left.num_steps_left and left.stage != left.stepped else 0.0
        num_steps = left.num_steps
        tail_ns = forecast.tail_ns
        tail_ns += (left.num_steps_left - num_steps) * forecast.speeds[0].step_ns  # Later stages with steps.
        return BatchMember(job, forecast, head_ns, num_steps, tail_ns, due_ns)

    @property
    def stage(self) -> Stage:
        """The stage of its steps; the last one with steps if it has none left."""
        stage = self.job.left.last_stepped
        assert stage is not None
        return stage

    @property
    def after_steps(self) -> Cursor:
        """Remaining work of the member after the steps of `stage`."""
        left = self.job.left
        if not left.num_steps_left:
            return left
        left = before_steps(left)
        return left.advanced(left.num_left_here)

    @property
    def alone_ns(self) -> float:
        """The time that it takes alone on one device."""
        return self.head_ns + self.num_steps * self.forecast.speeds[0].step_ns + self.tail_ns


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that share the forward passes of one device from `ready_ns` on, each to the end of its `stage`.

    Stages without steps run one by one, but for those that end their steps together: they share the next stage if it
    pays (`_together_ns`). `num_behind` other requests wait for the device.
    """

    members: tuple[BatchMember, ...]
    ready_ns: float
    step_time: StepTime
    num_behind: float = 0.0
    _ends_ns: tuple[float, ...] | None = field(default=None, init=False)

    @property
    def stage(self) -> Stage:
        """The stage of all members."""
        return self.members[0].stage

    @property
    def ends_ns(self) -> tuple[float, ...]:
        """End of each member, in their order.

        Those with the fewest steps end first, and the others go on without them.
        """
        if self._ends_ns is None:
            now = self.ready_ns + sum(member.head_ns for member in self.members)
            ends = [0.0] * len(self.members)
            done = 0
            left = sorted(range(len(self.members)), key=lambda index: self.members[index].num_steps)
            while left:
                num_steps = self.members[left[0]].num_steps - done
                now += num_steps * self.step_time(self.stage, [self.members[index].job.request for index in left])
                done += num_steps
                num_ended = sum(self.members[index].num_steps == done for index in left)
                ended = [self.members[index] for index in left[:num_ended]]
                left = left[num_ended:]
                for together, tail_ns in self._after_steps(ended, now, len(left)):
                    now += tail_ns
                    for member in together:
                        ends[self.members.index(member)] = now
            self._ends_ns = tuple(ends)
        return self._ends_ns

    def _after_steps(
        self, ended: Sequence[BatchMember], now_ns: float, num_left: int
    ) -> Iterator[tuple[Sequence[BatchMember], float]]:
        """Yield the members that have made their steps, in parts that share the next stage, and the time to their end.

        `num_left` others make further steps. The order is that in which they end.
        """
        if len(ended) == 1:  # The usual case.
            yield ended, ended[0].tail_ns
            return
        alike: dict[tuple[Stage | None, Shape], list[BatchMember]] = {}
        for member in ended:
            alike.setdefault((member.after_steps.stage, member.job.request.shape), []).append(member)
        for (stage, _), members in alike.items():
            whole_ns = None if stage is None else self._together_ns(stage, members, now_ns, num_left)
            parts = [(members, whole_ns)] if whole_ns else [((one,), one.tail_ns) for one in members]
            for _, tail_ns in parts:
                now_ns += tail_ns
            yield from parts

    def _together_ns(self, stage: Stage, members: Sequence[BatchMember], now_ns: float, num_left: int) -> float | None:
        """Return the time to the end of these members if they share a stage without steps; None if they do not.

        They do if they may and `LEAST_SAVED` of the time is saved; if none is late by it; and if those that need not be
        on time lose less than the members that make further steps, and the requests behind, gain.
        """
        if len(members) == 1 or not stage.spec.batchable or not all(member.job.may_share for member in members):
            return None
        requests = [member.job.request for member in members]
        apart_ns = sum(self.step_time(stage, [request]) for request in requests)
        saved_ns = apart_ns - self.step_time(stage, requests)
        if saved_ns < max(1, LEAST_SAVED * apart_ns):
            return None
        whole_ns = sum(member.tail_ns for member in members) - saved_ns
        ends_ns = accumulate(member.tail_ns for member in members)
        loss_ns = sum(whole_ns - end_ns for one, end_ns in zip(members, ends_ns, strict=True) if one.due_ns == inf)
        if loss_ns > saved_ns * (num_left + self.num_behind):
            return None
        return whole_ns if now_ns + whole_ns <= min(member.due_ns for member in members) else None

    def ends_if(self, end_ns: float) -> Iterator[tuple[int, float]]:
        """Yield each member's job id and when it ends, if the last of them ends then."""
        last_ns = max(self.ends_ns)
        for member, each_ns in zip(self.members, self.ends_ns, strict=True):
            yield member.job.job_id, end_ns - (last_ns - each_ns)

    @property
    def slack_ns(self) -> float:
        """The least time from a member's end to its deadline; negative if one is late."""
        pairs = zip(self.members, self.ends_ns, strict=True)
        return min((member.due_ns - end_ns for member, end_ns in pairs), default=inf)

    def keeps_promises(self, chunk_ns: int) -> bool:
        """Return whether promised deadlines are kept even if the members run one by one after a chunk together.

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

    def with_(self, member: BatchMember) -> Batch:
        return self._of((*self.members, member))

    def without(self, members: Iterable[BatchMember]) -> Batch:
        gone = {member.job.job_id for member in members}
        return self._of(tuple(member for member in self.members if member.job.job_id not in gone))

    def _of(self, members: tuple[BatchMember, ...]) -> Batch:
        return Batch(members, self.ready_ns, self.step_time, self.num_behind)

    def saved(self, member: BatchMember) -> float:
        """Return the share of a step's time that is saved if one more joins, compared with its running apart."""
        here = [each.job.request for each in self.members]
        if self.stage != member.stage:
            return 0.0
        apart_ns = self.step_time(self.stage, here) + member.forecast.speeds[0].step_ns
        return 1.0 - self.step_time(self.stage, [*here, member.job.request]) / apart_ns if apart_ns else 0.0

    def is_better_with(self, member: BatchMember, otherwise_ns: float, num_behind: float) -> bool:
        """Return whether the requests that need not be on time end earlier in the mean if one more joins.

        Otherwise it could begin alone at `otherwise_ns`; `num_behind` others wait for the device after it.
        """
        joined = self.with_(member)
        pairs = zip(self.members, self.ends_ns, joined.ends_ns, strict=False)
        loss_ns = sum(after_ns - before_ns for each, before_ns, after_ns in pairs if each.due_ns == inf)
        gain_ns = otherwise_ns + member.alone_ns - joined.ends_ns[-1] if member.due_ns == inf else 0.0
        saved_ns = max(self.ends_ns) + member.alone_ns - max(joined.ends_ns)
        return loss_ns <= gain_ns + num_behind * saved_ns

    def trimmed(self) -> Batch:
        """Return the batch without its longest members, so that the others fit into memory and are on time."""
        batch = self
        while len(batch.members) > 1 and (max(batch.ends_ns) == inf or batch.slack_ns < 0):
            batch = batch.without([max(batch.members, key=lambda member: (member.num_steps, member.job.job_id))])
        return batch

    def split(self) -> tuple[Batch, Batch]:
        """Return two batches, of which the second goes to another device.

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
        """Return the batch as one job of a rollout. It is on time if all members that must be are on time.

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
        """Yield the next chunks of steps, the stages before them, and the later ones of members without steps left."""
        now_ns = self.ready_ns
        done = 0
        ended = [member for member in self.members if not member.job.left.num_steps_left]
        sharing = [member for member in self.members if member.job.left.num_steps_left]
        now_ns += yield from self._tails(ended, now_ns, len(sharing), device_id, why)
        if num_chunks and most_steps:
            for member in sharing:
                yield from start_at_once(member.job.left, member.job.job_id, device_id, why)
                now_ns += member.head_ns
        for _ in range(num_chunks):
            if not sharing or done == most_steps:
                return
            step_ns = self.step_time(self.stage, [member.job.request for member in sharing])
            least = min(member.num_steps for member in sharing)
            num_steps = steps_in_chunk(min(least, most_steps) - done, step_ns, chunk_ns)
            done += num_steps
            now_ns += num_steps * step_ns
            yield start_steps(
                self.stage,
                tuple(member.job.job_id for member in sharing),
                (device_id,),
                num_steps,
                why + _others(len(sharing) - 1),
            )
            ended = [member for member in sharing if member.num_steps == done]
            sharing = [member for member in sharing if member.num_steps > done]
            now_ns += yield from self._tails(ended, now_ns, len(sharing), device_id, why)

    def _tails(
        self, ended: Sequence[BatchMember], now_ns: float, num_left: int, device_id: int, why: str
    ) -> Generator[Start, None, float]:
        """Start the next stages without steps of members that have made their steps; returns how long they take."""
        whole_ns = 0.0
        for together, tail_ns in self._after_steps(ended, now_ns, num_left):
            whole_ns += tail_ns
            lefts = {member.job.job_id: member.after_steps for member in together}
            if len(together) > 1:
                stage = together[0].after_steps.stage
                assert stage is not None
                yield start_stage(stage, tuple(lefts), (device_id,), why + _others(len(together) - 1))
                lefts = {job_id: left.advanced(1) for job_id, left in lefts.items()}
            for job_id, left in lefts.items():
                yield from start_at_once(left, job_id, device_id, why)
        return whole_ns


def _others(num_others: int) -> str:
    return f"; {num_others} other{'s' if num_others > 1 else ''} in the same batch" if num_others else ""
