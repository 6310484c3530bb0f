"""Measurements beside requests: which devices they take and when, and that every promise is kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

import pytest

from builders import ACCEPTING, ONE_OF_EACH, SIDES, promise, request, table
from quick import quick
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line, replay
from tilework.control.measurements import PATIENCE_NS
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import Accept, Action, DropComponents, Finish, Measure, Reject, RunWork, Stop, WakeAt
from tilework.core.component import Component
from tilework.core.events import (
    DeviceJoined,
    DeviceLost,
    Event,
    MeasurementAsked,
    MeasurementEnded,
    NodeCordoned,
    Stopped,
    Submitted,
    Woke,
    WorkFinished,
)
from tilework.core.request import Request
from tilework.core.time import ns_from_s
from tilework.core.work import Work

PATIENCE_S = PATIENCE_NS / 1e9


def asked(number: int = 1, degree: int = 1, run_s: float = 1.0, **more: Any) -> MeasurementAsked:
    return MeasurementAsked(number, "new", degree, ns_from_s(run_s), **{"digests": (), "room_bytes": 0, **more})


class Devices:
    """Accelerators that do what a controller says, in exactly the predicted time; moves of states take none.

    A measurement takes the time that was asked for. `measured` are those that have begun: when, and on which devices.
    """

    def __init__(self, num_devices: int, policy: str = "tilework") -> None:
        config, costs = ControllerConfig(policy=policy, max_batch=1), table(degrees=(1, 2, 4))
        self.controller = Controller(config, costs)
        self.lines = [header_line("test", config, costs)]
        self.now_ns = 0
        self.queues: dict[int, list[Work | int]] = {}
        self.running: dict[int, tuple[int, int]] = {}  # By work: when it began, and the time of a step.
        self.ended: set[int] = set()
        self.measured: dict[int, tuple[float, tuple[int, ...]]] = {}
        self.ends_s: dict[str, float] = {}
        self.answers: dict[str, Accept | Reject] = {}
        self.requests: dict[int, Request] = {}
        self.asked: dict[int, MeasurementAsked] = {}
        self.timers: list[tuple[int, int, int, Callable[[], object]]] = []
        self.sequence = count()
        for device_id in range(num_devices):
            self.queues[device_id] = []
            self.handle(DeviceJoined(device_id, 0))

    def at(self, at_ns: int, do: Callable[[], object], priority: int = 1) -> None:
        heappush(self.timers, (at_ns, priority, next(self.sequence), do))

    def submit(self, *asking: Request) -> None:
        for one in asking:
            self.at(one.arrival_ns, partial(self.handle, Submitted(one)))

    def measure(self, at_s: float, one: MeasurementAsked) -> None:
        self.at(ns_from_s(at_s), partial(self.handle, one))

    def run(self, until_s: float = 1e6) -> None:
        """Let time pass until nothing happens any more, or until this time."""
        while self.timers and self.timers[0][0] <= ns_from_s(until_s):
            self.now_ns, _, _, do = heappop(self.timers)
            do()

    def handle(self, event: Event) -> tuple[Action, ...]:
        if isinstance(event, MeasurementAsked):
            self.asked[event.measurement_id] = event
        actions = self.controller.handle(event, self.now_ns)
        self.lines.append(entry_line(event, actions, self.now_ns))
        for action in actions:
            self.perform(event, action)
        self.begin()
        return actions

    def perform(self, event: Event, action: Action) -> None:
        match action:
            case Accept(job_id, uid):
                assert isinstance(event, Submitted)
                self.answers[uid], self.requests[job_id] = action, event.request
            case Reject(uid):
                self.answers[uid] = action
            case Finish(_, uid):
                self.ends_s[uid] = self.now_ns / 1e9
            case RunWork(work):
                for device_id in work.devices:
                    self.queues[device_id].append(work)
            case Stop(work_id):
                self.stop(work_id)
            case Measure(number, devices):
                assert not any(map(self.queues.__getitem__, devices)), "a device that is measured on has works"
                self.measured[number] = self.now_ns / 1e9, devices
                for device_id in devices:
                    self.queues[device_id].append(number)
                self.at(self.now_ns + self.asked[number].run_ns, partial(self.end_measurement, number), 0)
            case WakeAt(at_ns):
                self.at(at_ns, partial(self.handle, Woke()))

    def end_measurement(self, number: int) -> None:
        for queue in self.queues.values():
            if number in queue:
                queue.remove(number)
        self.handle(MeasurementEnded(number))

    def works(self) -> list[Work]:
        works = {one.work_id: one for queue in self.queues.values() for one in queue if isinstance(one, Work)}
        return [works[number] for number in sorted(works)]

    def begin(self) -> None:
        """Begin the works that are the first on all their devices, after the earlier ones of their jobs."""
        begun: set[int] = set()
        for work in self.works():
            is_first = all(self.queues[device_id][0] is work for device_id in work.devices)
            if work.work_id not in self.running and is_first and begun.isdisjoint(work.job_ids):
                asking = [self.requests[job_id] for job_id in work.job_ids]
                step_ns = self.controller.costs.work_ns(work.stage, asking, len(work.devices))
                self.running[work.work_id] = self.now_ns, step_ns
                finished = WorkFinished(work.work_id, step_ns * work.num_steps)
                self.at(self.now_ns + step_ns * work.num_steps, partial(self.end, work, finished), 0)
            begun.update(work.job_ids)

    def end(self, work: Work, event: WorkFinished | Stopped) -> None:
        if work.work_id not in self.ended:
            self.ended.add(work.work_id)
            for device_id in work.devices:
                self.queues[device_id].remove(work)
            self.handle(event)

    def stop(self, work_id: int) -> None:
        """A work ends at its next step; it is revoked if it has not begun."""
        work = next(one for one in self.works() if one.work_id == work_id)
        if work_id not in self.running:
            self.running[work_id] = self.now_ns, 0
            self.at(self.now_ns, partial(self.end, work, Stopped(work_id, 0)), 0)
            return
        begin_ns, step_ns = self.running[work_id]
        steps_done = -(-(self.now_ns - begin_ns) // step_ns)
        if work.stage.has_steps and steps_done < work.num_steps:
            self.at(begin_ns + steps_done * step_ns, partial(self.end, work, Stopped(work_id, steps_done)), 0)

    def free_s(self, device_id: int) -> float:
        return self.controller.tracker.up[device_id].free_ns / 1e9


def test_a_measurement_takes_an_idle_device_at_once() -> None:
    devices = Devices(2, "fixed-sp1")
    devices.submit(request("a"))
    devices.measure(0.1, asked())
    devices.run(0.1)
    (busy,) = devices.works()[0].devices
    assert devices.measured == {1: (0.1, (1 - busy,))}
    assert devices.free_s(1 - busy) == 1.1


def test_it_waits_while_the_policy_has_works_for_all_devices_and_then_takes_the_first_that_is_free() -> None:
    devices = Devices(1)
    devices.submit(*(request(f"r{index}", steps=20) for index in range(20)))
    devices.measure(0.5, asked())
    devices.run()
    begin_s, _ = devices.measured[1]
    assert PATIENCE_S + 0.5 <= begin_s < PATIENCE_S + 5.0
    assert len(devices.ends_s) == 20
    assert replay(devices.lines)[1] is None


def test_a_long_request_pauses_for_it_between_two_works() -> None:
    devices = Devices(1)
    devices.submit(request("long", steps=400))
    devices.measure(0.5, asked())
    devices.run()
    begin_s, _ = devices.measured[1]
    assert PATIENCE_S + 0.5 <= begin_s < PATIENCE_S + 1.5
    assert devices.ends_s["long"] > begin_s + 5.0, "most of its steps are left"


def test_a_request_that_comes_meanwhile_is_told_how_long_the_measurement_takes() -> None:
    alone, beside = Devices(1), Devices(1)
    beside.measure(0.0, asked(run_s=3.0))
    for devices in (alone, beside):
        devices.submit(request("a", 1.0))
        devices.run()
    etas = [one.answers["a"].eta_ns / 1e9 for one in (alone, beside)]  # type: ignore[union-attr]
    assert etas[1] - etas[0] == pytest.approx(2.0)
    assert beside.ends_s["a"] == pytest.approx(etas[1], abs=0.05)


def test_a_promise_is_refused_only_if_the_measurement_leaves_no_time_and_the_earliest_end_counts_it() -> None:
    devices = Devices(1)
    devices.measure(0.0, asked(run_s=3.0))
    devices.submit(promise("tight", 1.0, 2.0), promise("wide", 1.0, 4.0))
    devices.run()
    refused, kept = devices.answers["tight"], devices.answers["wide"]
    assert isinstance(refused, Reject)
    assert refused.earliest_ns is not None
    assert 3.0 + 1.06 <= refused.earliest_ns / 1e9 < 3.0 + 1.5, "a proof for later has its own margin"
    assert isinstance(kept, Accept)
    assert devices.ends_s["wide"] <= 5.0


def test_it_waits_while_it_would_break_a_promise() -> None:
    devices = Devices(2)
    devices.submit(promise("a", 0.0, 2.5), promise("b", 0.0, 2.5))
    devices.measure(0.1, asked(degree=2))
    devices.run()
    assert all(devices.ends_s[uid] <= 2.5 for uid in "ab")
    begin_s, group = devices.measured[1]
    assert begin_s >= max(devices.ends_s.values())
    assert group == (0, 1)


def test_those_of_a_group_are_of_one_pool() -> None:
    devices = Devices(2, "fixed-sp1")
    devices.queues |= {2: [], 3: []}
    for device_id in (2, 3):
        devices.handle(DeviceJoined(device_id, 1))
    devices.submit(request("a"))
    devices.measure(0.1, asked(degree=2))
    devices.run(0.1)
    busy = {device_id // 2 for work in devices.works() for device_id in work.devices}
    (_, group) = devices.measured[1]
    assert {device_id // 2 for device_id in group} == {0, 1} - busy
    other = Devices(4)
    other.measure(0.0, asked(degree=4, devices=(0, 1)))
    other.run()
    assert not other.measured, "the model is served by two"


def test_the_device_that_loses_the_fewest_weights_is_taken() -> None:
    devices = Devices(0)
    devices.controller.costs.table = replace(devices.controller.costs.table)
    for device_id in range(2):
        devices.queues[device_id] = []
        devices.handle(DeviceJoined(device_id, 0, memory_bytes=10))
    tracker = devices.controller.tracker
    held = Component("shared", 2), Component("x", 3), Component("y", 5)
    tracker.set_memory(0, replace(tracker.up[0].memory, components=held))
    tracker.set_memory(1, replace(tracker.up[1].memory, components=held[:2]))
    actions = devices.handle(asked(digests=("shared", "of the new one"), room_bytes=6))
    assert actions[:2] == (DropComponents(1, ("shared",)), Measure(1, (1,))), "5 of 10 bytes are free, and 2 go"
    assert tracker.up[1].memory.components == held[1:2], "what it shares with others goes when it has ended"
    devices.handle(MeasurementEnded(1))
    actions = devices.handle(asked(2, digests=("shared",), room_bytes=10, devices=(0,)))
    assert actions[0] == DropComponents(0, ("shared", "x", "y"))


def test_a_device_that_is_lost_or_leaves_before_the_measurement_begins_is_replaced() -> None:
    for event in (DeviceLost(1, "killed"), NodeCordoned(0, (1,), "it leaves")):
        devices = Devices(3)
        devices.submit(*(request(f"r{index}", steps=60) for index in range(12)))
        devices.measure(0.0, asked(degree=2))
        devices.run(PATIENCE_S)
        assert not devices.measured
        taken = devices.controller._measurements._current
        assert taken is not None
        assert taken.occupied is not None
        lost = taken.occupied.devices[0]
        devices.queues.pop(lost)
        devices.timers = [one for one in devices.timers if one[0] < 0]
        devices.handle(
            replace(event, device_id=lost) if isinstance(event, DeviceLost) else NodeCordoned(0, (lost,), "")
        )
        current = taken.occupied
        assert current is not None
        assert lost not in current.devices


def test_a_lost_device_ends_the_measurement_when_that_is_reported() -> None:
    devices = Devices(1)
    devices.handle(asked())
    devices.handle(DeviceLost(0, "killed"))
    devices.queues[0].clear()
    devices.handle(DeviceJoined(0, 0))
    devices.handle(MeasurementEnded(1))
    assert devices.free_s(0) == 0.0
    devices.handle(asked(2))
    assert devices.measured[2] == (0.0, (0,))


def test_one_that_is_given_up_takes_nothing() -> None:
    devices = Devices(1)
    devices.submit(*(request(f"r{index}", steps=60) for index in range(4)))
    devices.measure(0.0, asked())
    devices.run(PATIENCE_S)
    assert not devices.measured
    free_s = devices.free_s(0)
    devices.handle(MeasurementEnded(1))
    assert devices.free_s(0) == pytest.approx(free_s - 1.0)
    devices.run()
    assert not devices.measured


def test_the_watchdog_does_not_take_it_for_a_work_that_is_stuck() -> None:
    devices = Devices(1)
    devices.handle(asked())
    watchdog = Watchdog(devices.controller.tracker, devices.controller.costs, WatchdogConfig())
    assert not [stuck for _ in range(100) for stuck in (*watchdog.check(), *watchdog.check_loads())]


@pytest.mark.parametrize("policy", quick(ONE_OF_EACH, [one for one in ACCEPTING if one != "deadline-belady"]))
@pytest.mark.parametrize("seed", quick((0,), range(2)))
def test_every_promise_is_kept_while_models_are_measured(policy: str, seed: int) -> None:
    """Requests keep all devices busy; a measurement is asked for a moment after the last one has ended."""
    rng, devices = Random(seed), Devices(4, policy)
    at_s, promises = 0.0, []
    for index in range(120):
        at_s += rng.expovariate(3.0)
        make = promise if rng.random() < 0.5 else request
        asking = make(f"r{index}", at_s, slo_s=rng.uniform(1.5, 12.0), side=rng.choice(SIDES), steps=rng.randint(2, 12))
        devices.submit(asking)
        promises += [asking] if make is promise else []
    end, numbers = devices.end_measurement, count(2)

    def end_and_ask(number: int) -> None:
        end(number)
        one = asked(next(numbers), rng.choice((1, 1, 2, 4)), rng.uniform(0.2, 2.0))
        if devices.now_ns < ns_from_s(at_s):
            devices.measure(devices.now_ns / 1e9 + 0.1, one)

    devices.end_measurement = end_and_ask  # type: ignore[method-assign]
    devices.measure(1.0, asked())
    devices.run()
    accepted = [one for one in promises if isinstance(devices.answers[one.uid], Accept)]
    late = [one.uid for one in accepted if ns_from_s(devices.ends_s[one.uid]) > (one.deadline_ns or 0)]
    assert not late, f"of {len(accepted)} promises; seed {seed}"
    assert len(devices.measured) >= 5
    assert len(accepted) >= 15
    assert replay(devices.lines)[1] is None
