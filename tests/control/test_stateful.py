"""Invariants of the controller under a hostile driver: any legal order of events, losses, failures, cancellations."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from builders import ONE_OF_EACH, SIDES, request, table
from stages import DECODE, DIFFUSE, ENCODE, at_start
from tilework.admission.contract import Moment
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line, replay
from tilework.core.actions import Accept, Action, DropState, Finish, Measure, MoveState, Reject, RunWork, Stop, WakeAt
from tilework.core.events import (
    Broken,
    Cancelled,
    DeviceJoined,
    DeviceLost,
    Event,
    MeasurementAsked,
    MeasurementEnded,
    OutOfMemory,
    Restored,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
    WorkFinished,
)
from tilework.core.request import OnMiss, Status
from tilework.core.work import Work
from tilework.cost.demand import fastest
from tilework.policy.registry import policy_names

MS = 1_000_000
NUM_DEVICES = 4
EAGER = ("edf", "fixed-sp1")
TABLE = table(degrees=(1, 2, 4))


class HostileDriver(RuleBasedStateMachine):
    """Executes the controller's commands as devices would, and injects the faults of a cluster.

    `queues` are the works of each device that is up; a work runs when it is the first of all its members, and the
    earlier works of its job have ended. `promised` are the devices that will have a job's state when all commands so
    far have been carried out, `seen` those that have its conditioning. `chains` are the steps that works have really
    done for a job, in order. No work is shared: batches are tested in `test_batches` and by `tilework fuzz`.
    """

    @initialize(
        policy=st.sampled_from(ONE_OF_EACH),
        num_devices=st.integers(1, NUM_DEVICES),
        devices_per_node=st.sampled_from((2, NUM_DEVICES)),
    )
    def set_up(self, policy: str, num_devices: int, devices_per_node: int) -> None:
        self.config = ControllerConfig(policy=policy, max_batch=1)
        self.controller = Controller(self.config, TABLE)
        self.devices_per_node = devices_per_node
        self.now_ns = 0
        self.wakes_ns: list[int] = []
        self.queues: dict[int, list[Work]] = {}
        self.stopped: set[int] = set()
        self.broken: set[int] = set()
        self.promised: dict[int, set[int]] = defaultdict(set)
        self.seen: dict[int, set[int]] = defaultdict(set)
        self.chains: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        self.requests: dict[str, int] = {}
        self.job_of: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.statuses: dict[str, Status] = {}
        self.etas_ns: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.written_off: list[Work] = []
        self.states: dict[Moment, object] = {}
        self.is_measuring, self.num_asked = False, 0
        self.measured_on: tuple[int, ...] = ()
        self.lines = [header_line("test", self.config, TABLE)]
        for device_id in range(num_devices):
            self.join(device_id)

    def describe(self, event: Event) -> None:
        actions = self.controller.handle(event, self.now_ns)
        self.lines.append(entry_line(event, actions, self.now_ns))
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self.job_of[uid] = job_id
                self.etas_ns[uid] = eta_ns
                assert eta_ns >= self.now_ns
            case Reject(uid):
                self.end(uid, Status.REJECTED)
            case Finish(job_id, uid, status, _):
                assert self.job_of[uid] == job_id
                assert not self.seen[job_id], "devices keep something of a request that has ended"
                self.end(uid, status)
            case RunWork(work):
                self.enqueue(work)
            case Stop(work_id):
                assert work_id in self.in_flight()
                self.stopped.add(work_id)
            case MoveState(job_id, targets, stages):
                assert self.chains[job_id] or self.is_under_way(job_id), "there is nothing to move"
                assert not self.promised[job_id] & set(targets), "a move to a device that has the state"
                assert set(targets) <= self.queues.keys(), "a move to a device that is down"
                self.promised[job_id] |= set(targets)
                assert stages in ((), (0,), (1,)), "a decode needs the latents alone, steps the conditioning"
                if stages != (1,):
                    assert all(bool(stages) == (target not in self.seen[job_id]) for target in targets)
                self.seen[job_id] |= set(targets)
            case DropState(job_id, devices):
                assert set(devices) <= self.queues.keys()
                assert set(devices) <= self.seen[job_id]
                self.seen[job_id] -= set(devices)
                self.promised[job_id] -= set(devices)
            case Measure(_, devices):
                assert not any(self.queues[device_id] for device_id in devices), "it would wait for works"
                assert len({device_id // self.devices_per_node for device_id in devices}) == 1
                self.measured_on = devices
            case WakeAt(at_ns):
                self.wakes_ns.append(at_ns)

    def end(self, uid: str, status: Status) -> None:
        assert status in (Status.DONE, Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.REJECTED)
        self.ends[uid] += 1
        self.statuses[uid] = status

    def in_flight(self) -> dict[int, Work]:
        return {work.work_id: work for queue in self.queues.values() for work in queue}

    def is_under_way(self, job_id: int) -> bool:
        return any(work.job_ids == (job_id,) for work in self.in_flight().values())

    def is_wanted(self, work: Work) -> bool:
        """Whether the job of a work has neither ended nor begun another attempt."""
        job = self.controller.tracker.job(work.job_ids[0])
        return job is not None and job.attempt == work.members[0].attempt

    def enqueue(self, work: Work) -> None:
        (job_id,) = work.job_ids
        queues = [self.queues[device_id] for device_id in work.devices]  # KeyError: a work for a device that is down.
        assert all(len(queue) < 6 for queue in queues), "devices have more queued works than allowed"
        if work.stage.name == ENCODE:
            assert not self.seen[job_id], "something of a former attempt was kept"
            self.seen[job_id] = set(work.devices)
        else:
            assert set(work.devices) <= self.promised[job_id], "a work runs on a device without the state"
            assert set(work.devices) <= self.seen[job_id]
            assert work.members[0].position == work.members[0].first_step + 1
        self.promised[job_id] = set(work.devices)
        assert work.after == tuple(sorted({queue[-1].work_id for queue in queues if queue}))
        for queue in queues:
            queue.append(work)

    def runnable(self) -> list[Work]:
        return [work for _, work in sorted(self.in_flight().items()) if self.can_run(work)]

    def can_run(self, work: Work) -> bool:
        is_first = all(self.queues[device_id][0] == work for device_id in self.carriers(work))
        attempts = [(one.job_id, one.attempt) for one in work.members]
        is_first = is_first and set(self.carriers(work)).isdisjoint(self.measured_on)
        return is_first and not any(
            [(one.job_id, one.attempt) for one in other.members] == attempts and other.work_id < work.work_id
            for other in self.in_flight().values()
        )

    def carriers(self, work: Work) -> list[int]:
        return [device_id for device_id in work.devices if work in self.queues.get(device_id, ())]

    def take(self, work: Work) -> None:
        for device_id in self.carriers(work):
            self.queues[device_id].remove(work)

    # Events.

    @rule(
        side=st.sampled_from(SIDES),
        steps=st.integers(1, 12),
        slo_ms=st.none() | st.integers(1, 20_000),
        is_tight=st.booleans(),
        on_miss=st.sampled_from(OnMiss),
    )
    def submit(self, side: int, steps: int, slo_ms: int | None, is_tight: bool, on_miss: OnMiss) -> None:
        """`is_tight`: the deadline is a little after the earliest end, so that one fault makes it unreachable."""
        uid = f"r{len(self.requests)}"
        slo_s = None if slo_ms is None else slo_ms / 1000
        alone_ns = self.alone_ns(uid, side, steps)
        if is_tight and slo_s is not None:
            slo_s = slo_s / 20 + alone_ns / 1e9
        new = request(uid, self.now_ns / 1e9, side=side, steps=steps, slo_s=slo_s, on_miss=on_miss)
        self.requests[uid] = steps
        is_first = Status.DONE not in self.statuses.values()  # From those that are done, predictions learn.
        was_idle = not self.job_of.keys() - self.ends.keys()
        self.describe(Submitted(new))
        if is_first and was_idle and self.queues and uid in self.etas_ns and slo_s is None:
            assert self.etas_ns[uid] >= self.now_ns + alone_ns

    def alone_ns(self, uid: str, side: int, steps: int) -> int:
        """At the degree at which it ends first."""
        alone, policy, costs = request(uid, side=side, steps=steps), self.controller.policy, self.controller.costs
        return fastest(alone, at_start(alone), policy.degrees(alone, costs), costs).run_ns

    @precondition(lambda self: self.runnable())
    @rule(data=st.data(), run_ms=st.integers(1, 900))
    def end_work(self, data: st.DataObject, run_ms: int) -> None:
        work = data.draw(st.sampled_from(self.runnable()))
        self.now_ns += run_ms * MS
        self.end_as_it_must(work, data.draw(st.integers(0, work.num_steps)), run_ms * MS)

    def end_as_it_must(self, work: Work, num_steps: int, run_ns: int) -> None:
        """By a lost member, by a stop after `num_steps`, or with all its steps."""
        self.take(work)
        if work.work_id in self.broken:
            num_steps = min(num_steps, work.num_steps - 1) if work.work_id not in self.stopped else 0
            self.record(work, num_steps)
            self.describe(Broken(work.work_id, num_steps))
        elif work.work_id in self.stopped:
            num_steps = num_steps if work.stage.name == DIFFUSE and self.is_next(work) else 0
            self.record(work, num_steps)
            self.describe(Stopped(work.work_id, num_steps))
        else:
            self.record(work, work.num_steps)
            self.describe(WorkFinished(work.work_id, run_ns))

    def is_next(self, work: Work) -> bool:
        """Whether its job has reached the work's first step; not after a work that was stopped before its end."""
        chain = self.chains[work.job_ids[0]]
        done = sum(steps for stage, steps, _ in chain if stage == DIFFUSE)
        return bool(chain) and work.members[0].first_step == done

    def record(self, work: Work, num_steps: int) -> None:
        (job_id,) = work.job_ids
        if not self.is_wanted(work) or not num_steps:
            return
        done = sum(steps for stage, steps, _ in self.chains[job_id] if stage == DIFFUSE)
        assert work.members[0].first_step == done, "a work begins on a device without the state"
        self.chains[job_id].append((work.stage.name, num_steps, work.work_id))

    @precondition(lambda self: self.runnable())
    @rule(data=st.data(), state_lost=st.booleans())
    def fail_work(self, data: st.DataObject, state_lost: bool) -> None:
        work = data.draw(st.sampled_from(self.runnable()))
        self.take(work)
        self.written_off.append(work)
        if state_lost and self.is_wanted(work):
            self.chains[work.job_ids[0]].clear()
        self.describe(WorkFailed(work.work_id, "broken on purpose", state_lost))

    @precondition(lambda self: self.runnable())
    @rule(data=st.data())
    def run_out_of_memory(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.runnable()))
        is_running = work.stage.name == DIFFUSE and self.is_next(work)
        steps_done = data.draw(st.integers(0, work.num_steps - 1)) if is_running else 0
        self.take(work)
        self.written_off.append(work)
        self.record(work, steps_done)
        self.describe(OutOfMemory(work.work_id, steps_done))

    @rule(side=st.sampled_from(SIDES), steps=st.integers(1, 12), kept=st.none() | st.integers(0, 12))
    def restore(self, side: int, steps: int, kept: int | None) -> None:
        """Restore a request that another controller had accepted, with this many steps in its checkpoint."""
        uid = f"r{len(self.requests)}"
        kept = None if kept is None else min(kept, steps)
        self.requests[uid] = steps
        if kept is not None:
            chain = [(ENCODE, 1, 0), (DIFFUSE, kept, 0)]
            self.chains[self.controller._admit._next_job_id] = [piece for piece in chain if piece[1]]
        position = 0 if kept is None else kept + 1
        self.describe(Restored(request(uid, self.now_ns / 1e9, side=side, steps=steps), position))
        assert uid in self.job_of, "it is accepted, whatever admission would answer"

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def lose_device(self, data: st.DataObject) -> None:
        device_id = data.draw(st.sampled_from(sorted(self.queues)))
        self.measured_on = tuple(one for one in self.measured_on if one != device_id)
        for work in self.queues.pop(device_id):
            if self.carriers(work):
                self.broken.add(work.work_id)
            else:
                self.written_off.append(work)
        for devices in (*self.seen.values(), *self.promised.values()):
            devices.discard(device_id)
        self.describe(DeviceLost(device_id, "broken on purpose"))

    @precondition(lambda self: not self.is_measuring)
    @rule(degree=st.sampled_from((1, 2)), run_ms=st.integers(1, 900))
    def ask_to_measure(self, degree: int, run_ms: int) -> None:
        self.num_asked += 1
        self.is_measuring = True
        self.describe(MeasurementAsked(self.num_asked, "new", degree, run_ms * MS, (), 0))

    @precondition(lambda self: self.is_measuring)
    @rule(run_ms=st.integers(1, 900))
    def end_measurement(self, run_ms: int) -> None:
        """It has run, or is given up, or a device of it was lost."""
        self.now_ns += run_ms * MS
        self.is_measuring, self.measured_on = False, ()
        self.describe(MeasurementEnded(self.num_asked))

    @rule(device_id=st.integers(0, NUM_DEVICES - 1))
    def join(self, device_id: int) -> None:
        if device_id not in self.queues:
            self.queues[device_id] = []
            self.describe(DeviceJoined(device_id, device_id // self.devices_per_node))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.requests)))
        if uid not in self.ends:
            self.cancelled.add(uid)
        self.describe(Cancelled(uid, "the client went away"))

    @precondition(lambda self: self.written_off)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.written_off))
        event: Event = data.draw(
            st.sampled_from(
                [
                    WorkFinished(work.work_id, MS),
                    Stopped(work.work_id, 1),
                    Broken(work.work_id, 1),
                    OutOfMemory(work.work_id, 1),
                    WorkFailed(work.work_id, "late"),
                ]
            )
        )
        ends = self.ends.total()
        self.describe(event)
        assert self.ends.total() == ends, "a late message ended a request"

    @precondition(lambda self: self.wakes_ns)
    @rule()
    def wake(self) -> None:
        wake_ns = min(self.wakes_ns)
        self.wakes_ns.remove(wake_ns)
        self.now_ns = max(self.now_ns, wake_ns)
        self.describe(Woke())

    # Invariants.

    @invariant()
    def each_request_ends_at_most_once(self) -> None:
        assert all(count == 1 for count in self.ends.values())

    @invariant()
    def what_admission_reads_is_kept_up_to_date(self) -> None:
        """Sums and orders against a walk over all devices; what is equal at equal moments may be kept."""
        if hasattr(self, "controller"):
            tracker = self.controller.tracker
            tracker.set_time(self.now_ns)
            free_ns = sorted(device.free_ns for device in tracker.devices)
            assert (tracker.free_ns(), tracker.taken_ns()) == (free_ns, sum(free_ns) - len(free_ns) * self.now_ns)
            state = free_ns, tracker.running(), [block.ready_ns for block in tracker.reserved() if block.ready_ns]
            assert self.states.setdefault(tracker.moment, state) == state

    @invariant()
    def open_requests_are_tracked_and_only_they(self) -> None:
        if hasattr(self, "controller"):
            assert set(self.controller.tracker.job_ids) == self.requests.keys() - self.ends.keys()

    @invariant()
    def something_can_always_go_on(self) -> None:
        if not hasattr(self, "controller"):
            return
        assert self.runnable() or not any(self.queues.values()) or self.measured_on, "groups wait for each other"
        if self.controller.tracker.num_waiting() and self.queues:
            is_going_on = self.runnable() or self.wakes_ns or self.is_measuring
            assert is_going_on, "a request waits, and nothing will ever be planned again"

    @invariant()
    def no_device_idles_while_a_request_waits(self) -> None:
        """Unless a start would break a promise."""
        if not hasattr(self, "controller") or self.config.policy not in EAGER:
            return
        if self.controller.tracker.num_waiting() and not self.controller.tracker.promised():
            is_busy = [bool(device.works) for device in self.controller.tracker.devices]
            assert all(is_busy), "a device idles while a request waits"

    @invariant()
    def no_device_works_for_an_attempt_that_is_over(self) -> None:
        for work in self.in_flight().values() if hasattr(self, "controller") else ():
            job = self.controller.tracker.job(work.job_ids[0])
            is_wanted = job is not None and self.is_wanted(work) and not job.is_stopping
            assert is_wanted != (work.work_id in self.stopped), "stopped exactly when its attempt is over"

    @invariant()
    def the_tracker_knows_what_devices_do(self) -> None:
        if hasattr(self, "controller"):
            known = self.controller.tracker.works
            works = {
                device.device_id: [work for work in device.works if work.work_id in known]
                for device in self.controller.tracker.devices
            }
            assert works == self.queues
            assert known == self.in_flight()

    @invariant()
    def a_done_request_went_through_all_its_steps_once(self) -> None:
        for uid, status in getattr(self, "statuses", {}).items():
            if status is Status.DONE:
                chain = self.chains[self.job_of[uid]]
                stages = [stage for stage, _, _ in chain]
                assert stages == [ENCODE, *[DIFFUSE] * (len(chain) - 2), DECODE]
                assert sum(steps for stage, steps, _ in chain if stage == DIFFUSE) == self.requests[uid]

    def teardown(self) -> None:
        """Add a device and let all works end: every request ends, and the log replays."""
        if not hasattr(self, "controller"):
            return
        if not self.queues:
            self.join(0)
        if self.is_measuring:
            self.end_measurement(1)
        while self.controller.tracker.jobs or self.controller.tracker.works:
            if runnable := self.runnable():
                self.now_ns += MS
                self.end_as_it_must(runnable[0], 0, MS)
            else:
                self.wake()
        assert self.ends.keys() == self.requests.keys()
        assert all(self.statuses[uid] is Status.CANCELLED for uid in self.cancelled)
        assert not self.controller.tracker.num_waiting()
        self.a_done_request_went_through_all_its_steps_once()
        count, difference = replay(self.lines)
        assert difference is None
        assert count == len(self.lines) - 1


class HostileDriverOfAny(HostileDriver):
    """The same with any policy."""

    @initialize(
        policy=st.sampled_from([name for name in policy_names() if name != "deadline-belady"]),
        num_devices=st.integers(1, NUM_DEVICES),
        devices_per_node=st.sampled_from((2, NUM_DEVICES)),
    )
    def set_up(self, policy: str, num_devices: int, devices_per_node: int) -> None:
        super().set_up(policy=policy, num_devices=num_devices, devices_per_node=devices_per_node)


# Many seconds of CPU, and a machine may be slow.
SETTINGS = settings(max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
TestHostileDriver = HostileDriver.TestCase
TestHostileDriver.settings = SETTINGS
TestHostileDriverOfAny = pytest.mark.slow(pytest.mark.timeout(1000)(HostileDriverOfAny.TestCase))
TestHostileDriverOfAny.settings = settings(SETTINGS, max_examples=450)
