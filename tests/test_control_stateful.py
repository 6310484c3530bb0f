"""A hostile driver: any legal order of events, lost devices, failures, cancellations. What must hold, holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from builders import ALL_STAGES, SIDES, request, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line, replay
from tilework.core.actions import Accept, Action, DropState, Finish, MoveState, Reject, RunStage, RunSteps, Stop
from tilework.core.events import (
    Cancelled,
    Event,
    GpuJoined,
    GpuLost,
    StageFinished,
    StepsFinished,
    Stopped,
    Submitted,
    WorkFailed,
)
from tilework.core.request import OnMiss, Status
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Work
from tilework.policy.admission import service_time_ns
from tilework.policy.registry import policy_names

MS = 1_000_000


@dataclass
class Lineage:
    """What the devices really did for one attempt of a job: its chain must be encode, all steps in order, decode."""

    stages: list[str] = field(default_factory=list)
    steps: int = 0
    state_on: int | None = None


class HostileDriver(RuleBasedStateMachine):
    """Executes the controller's commands as devices would, and breaks what a cluster breaks."""

    @initialize(policy=st.sampled_from(policy_names()), num_gpus=st.integers(1, 3))
    def set_up(self, policy: str, num_gpus: int) -> None:
        self.config = ControllerConfig(policy=policy)
        self.controller = Controller(self.config, table())
        self.now_ns = 0
        self.queues: dict[int, list[Work]] = {}
        self.stopped: set[int] = set()
        self.lineages: dict[tuple[int, int], Lineage] = {}
        self.seen: dict[int, set[int]] = {}
        self.requests: dict[str, int] = {}
        self.job_of: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.statuses: dict[str, Status] = {}
        self.cancelled: set[str] = set()
        self.written_off: list[Work] = []
        self.lines = [header_line("test", self.config, table())]
        for gpu in range(num_gpus):
            self.join(gpu)

    def tell(self, event: Event) -> None:
        actions = self.controller.handle(event, self.now_ns)
        self.lines.append(entry_line(event, actions, self.now_ns))
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self.job_of[uid] = job_id
                assert eta_ns >= self.now_ns
            case Reject(uid):
                self.end(uid, Status.REJECTED)
            case Finish(job_id, uid, status, _):
                assert self.job_of[uid] == job_id
                assert not self.seen.get(job_id), "devices keep what they hold of a request that has ended"
                self.end(uid, status)
            case RunStage(work) | RunSteps(work):
                assert (work.stage.name == DIFFUSE) == isinstance(action, RunSteps)
                self.enqueue(work)
            case Stop(work_id):
                assert any(w.work_id == work_id for queue in self.queues.values() for w in queue)
                self.stopped.add(work_id)
            case MoveState(job_id, source, target, conditioning):
                lineage = self.lineage(job_id)
                assert lineage.state_on == source != target
                assert {source, target} <= self.queues.keys(), "a move from or to a device that is down"
                lineage.state_on = target
                assert conditioning == (target not in self.seen[job_id])
                self.seen[job_id].add(target)
            case DropState(job_id, gpus):
                assert set(gpus) <= self.queues.keys()
                self.seen[job_id] -= set(gpus)

    def end(self, uid: str, status: Status) -> None:
        assert status.is_final
        self.ends[uid] += 1
        self.statuses[uid] = status

    def lineage(self, job_id: int) -> Lineage:
        attempts = [attempt for (job, attempt) in self.lineages if job == job_id]
        return self.lineages[job_id, max(attempts)]

    def enqueue(self, work: Work) -> None:
        (gpu,), (job_id,), (attempt,) = work.gpus, work.job_ids, work.attempts
        queue = self.queues[gpu]  # KeyError: a work for a device that is down.
        assert len(queue) < 2, "more than one work is queued behind the running one"
        lineage = self.lineages.setdefault((job_id, attempt), Lineage())
        assert (lineage.state_on is None) == (work.stage.name == ENCODE)
        assert lineage.state_on in (None, gpu), "a work runs where the state is not"
        lineage.state_on = gpu
        assert work.stage.name != ENCODE or not self.seen.get(job_id), "something of a former attempt was kept"
        self.seen.setdefault(job_id, set()).add(gpu)
        assert work.after == tuple(queued.work_id for queued in queue[-1:])
        queue.append(work)

    # What happens.

    @rule(
        side=st.sampled_from(SIDES),
        steps=st.integers(1, 12),
        slo_ms=st.none() | st.integers(1, 20_000),
        is_tight=st.booleans(),
        on_miss=st.sampled_from(OnMiss),
    )
    def submit(self, side: int, steps: int, slo_ms: int | None, is_tight: bool, on_miss: OnMiss) -> None:
        """`is_tight`: the deadline lies a little after the earliest end, so that one mishap makes it unreachable."""
        uid = f"r{len(self.requests)}"
        slo_s = None if slo_ms is None else slo_ms / 1000
        if is_tight and slo_s is not None:
            alone = request(uid, side=side, steps=steps)
            slo_s = slo_s / 20 + service_time_ns(alone, self.controller.costs) / 1e9
        new = request(uid, self.now_ns / 1e9, side=side, steps=steps, slo_s=slo_s, on_miss=on_miss)
        self.requests[uid] = steps
        was_idle = not self.job_of.keys() - self.ends.keys()
        self.tell(Submitted(new))
        if was_idle and self.queues and slo_s is None:
            accepted_eta_ns = self.controller.tracker.jobs[self.job_of[uid]].eta_ns
            assert accepted_eta_ns >= self.now_ns + service_time_ns(new, self.controller.costs)

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data(), run_ms=st.integers(1, 900))
    def finish_work(self, data: st.DataObject, run_ms: int) -> None:
        gpu = data.draw(st.sampled_from(sorted(g for g, queue in self.queues.items() if queue)))
        work = self.queues[gpu].pop(0)
        self.now_ns += run_ms * MS
        if work.work_id in self.stopped:
            done = data.draw(st.integers(0, work.num_steps)) if work.stage.name == DIFFUSE else 0
            self.tell(Stopped(work.work_id, done))
            return
        self.record(work)
        kind = StepsFinished if work.stage.name == DIFFUSE else StageFinished
        self.tell(kind(work.work_id, run_ms * MS))

    def record(self, work: Work) -> None:
        lineage = self.lineages[work.job_ids[0], work.attempts[0]]
        lineage.stages.append(work.stage.name)
        lineage.steps += work.num_steps if work.stage.name == DIFFUSE else 0

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data())
    def fail_work(self, data: st.DataObject) -> None:
        gpu = data.draw(st.sampled_from(sorted(g for g, queue in self.queues.items() if queue)))
        work = self.queues[gpu].pop(0)
        self.written_off.append(work)
        self.tell(WorkFailed(work.work_id, "broken on purpose"))

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def lose_gpu(self, data: st.DataObject) -> None:
        gpu = data.draw(st.sampled_from(sorted(self.queues)))
        self.written_off += self.queues.pop(gpu)
        for gpus in self.seen.values():
            gpus.discard(gpu)
        self.tell(GpuLost(gpu, "broken on purpose"))

    @rule(gpu=st.integers(0, 2))
    def join(self, gpu: int) -> None:
        if gpu not in self.queues:
            self.queues[gpu] = []
            self.tell(GpuJoined(gpu, 0, ALL_STAGES))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.requests)))
        if uid not in self.ends:
            self.cancelled.add(uid)
        self.tell(Cancelled(uid, "the client went away"))

    @precondition(lambda self: self.written_off)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.written_off))
        event: Event = data.draw(
            st.sampled_from(
                [StepsFinished(work.work_id, MS), Stopped(work.work_id, 1), WorkFailed(work.work_id, "late")]
            )
        )
        ends = self.ends.total()
        self.tell(event)
        assert self.ends.total() == ends, "a late message ended a request"

    # What must hold.

    @invariant()
    def each_request_ends_at_most_once(self) -> None:
        assert all(count == 1 for count in self.ends.values())

    @invariant()
    def open_requests_are_tracked_and_only_they(self) -> None:
        if hasattr(self, "controller"):
            assert set(self.controller.tracker.job_ids) == self.requests.keys() - self.ends.keys()

    @invariant()
    def no_device_idles_while_a_request_waits(self) -> None:
        if hasattr(self, "controller") and self.controller.tracker.num_waiting():
            assert all(self.queues.values()), "a device idles beside a waiting request"

    @invariant()
    def no_device_works_for_an_attempt_that_is_over(self) -> None:
        for work in (work for queue in getattr(self, "queues", {}).values() for work in queue):
            job = self.controller.tracker.job(work.job_ids[0])
            is_over = job is None or job.attempt != work.attempts[0]
            assert is_over == (work.work_id in self.stopped), "stopped exactly when nobody wants it any more"

    @invariant()
    def a_done_request_went_through_all_its_steps_once(self) -> None:
        for uid, status in getattr(self, "statuses", {}).items():
            if status is Status.DONE:
                lineage = self.lineage(self.job_of[uid])
                stages = lineage.stages
                assert stages[0] == ENCODE
                assert stages[-1] == DECODE
                assert set(stages[1:-1]) == {DIFFUSE}
                assert lineage.steps == self.requests[uid]

    def teardown(self) -> None:
        """Bring a device up, let the devices work: every request ends, and the log replays."""
        if not hasattr(self, "controller"):
            return
        if not self.queues:
            self.join(0)
        while any(self.queues.values()):
            gpu = next(g for g, queue in self.queues.items() if queue)
            work = self.queues[gpu].pop(0)
            self.now_ns += MS
            if work.work_id in self.stopped:
                self.tell(Stopped(work.work_id, 0))
            else:
                self.record(work)
                kind = StepsFinished if work.stage.name == DIFFUSE else StageFinished
                self.tell(kind(work.work_id, MS))
        assert self.ends.keys() == self.requests.keys()
        assert all(self.statuses[uid] is Status.CANCELLED for uid in self.cancelled)
        tracker = self.controller.tracker
        assert not tracker.jobs
        assert not tracker.works
        assert not tracker.num_waiting()
        self.a_done_request_went_through_all_its_steps_once()
        count, difference = replay(self.lines)
        assert difference is None
        assert count == len(self.lines) - 1


TestHostileDriver = HostileDriver.TestCase
TestHostileDriver.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
