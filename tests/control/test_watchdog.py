"""The watchdog: which works it suspects, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from builders import Idle, controller, request
from stages import DIFFUSE
from tilework.control.cluster.device import NO_WORK, PendingLoad
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import RunWork
from tilework.core.component import LoadSource
from tilework.core.events import Cancelled, DeviceLost, Event, Submitted, WorkFinished
from tilework.core.policy import ClusterView, CostModel
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Group, Plan, Start, Work
from tilework.policy import registry

CONFIG = WatchdogConfig(tick_ns=NS_PER_S, least_ns=3 * NS_PER_S, factor=10)


class Rig:
    """A controller and a watchdog over it; tests report for the devices. A step of 128 px takes 0.1 s."""

    def __init__(self, policy: str = "edf", num_devices: int = 1) -> None:
        self.controller = controller(policy, num_devices, degrees=(1, 2))
        self.watchdog = Watchdog(self.controller.tracker, self.controller.costs, CONFIG)
        self.works: list[Work] = []
        self.now_ns = 0

    def handle(self, event: Event) -> None:
        self.now_ns += NS_PER_MS
        actions = self.controller.handle(event, self.now_ns)
        self.works += [action.work for action in actions if isinstance(action, RunWork)]

    def begin_steps(self, uid: str = "a", **fields: int) -> Work:
        """Submit a request and end its encode; returns its first chunk of steps."""
        count = len(self.works)
        self.handle(Submitted(request(uid, **fields)))
        self.handle(WorkFinished(self.works[count].work_id, NS_PER_MS))
        return next(work for work in self.works[count:] if work.stage.name == DIFFUSE)

    def checks(self, count: int) -> list[list[int]]:
        """The ids of the stuck works at each of `count` checks."""
        return [[work.work_id for work in self.watchdog.check()] for _ in range(count)]


def test_a_quiet_work_is_named_once_and_again_after_another_limit() -> None:
    rig = Rig()
    work = rig.begin_steps()
    assert rig.checks(9) == [[], [], [], [], [work.work_id], [], [], [], [work.work_id]]


def test_progress_begins_the_limit_anew() -> None:
    rig = Rig()
    work = rig.begin_steps()
    for _ in range(5):
        assert rig.checks(4) == [[]] * 4
        rig.watchdog.on_progress(work.work_id)
    assert rig.checks(5)[-1] == [work.work_id]


def test_a_quiet_encode_is_named_too() -> None:
    rig = Rig()
    rig.handle(Submitted(request("a")))
    assert rig.checks(5) == [[], [], [], [], [rig.works[0].work_id]]


def test_the_limit_of_a_long_step_stays_when_its_request_is_cancelled() -> None:
    """At 1280 px a step takes 10 s, so its limit is 100 s."""
    rig = Rig()
    work = rig.begin_steps(side=1280)
    assert rig.checks(50) == [[]] * 50
    rig.handle(Cancelled("a", "not wanted"))
    assert rig.checks(52) == [*[[]] * 51, [work.work_id]]


def test_a_work_behind_another_is_not_suspected() -> None:
    """Its limit begins when the other work has ended."""
    rig = Rig()
    first = rig.begin_steps()
    assert rig.checks(4) == [[]] * 4
    rig.handle(WorkFinished(first.work_id, first.num_steps * 100 * NS_PER_MS))
    second = rig.controller.tracker.devices[0].works[0]
    assert rig.checks(5) == [[], [], [], [], [second.work_id]]


ROUTES: dict[str, tuple[Group, ...]] = {"single": ((1,),), "pair": ((0, 1),), "moving": ((0,), (1,))}


@dataclass(frozen=True)
class ByName(Idle):
    """Queues single steps ahead: of "single" on device 1, of "pair" on both, of "moving" on device 0, then on device 1.

    Encode and decode run on device 0.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        starts = []
        for job in view.waiting():
            assert job.left.stage is not None
            route = ROUTES[job.request.uid] if job.left.stage.name == DIFFUSE else ((0,),)
            starts += [
                Start(stage=job.left.stage, job_ids=(job.job_id,), devices=devices, num_steps=1, why="its name")
                for devices in route
            ]
        return Plan(starts=tuple(starts))


def rig_of_two(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setitem(registry._GIVEN, "by-name", ByName)
    return Rig("by-name", num_devices=2)


def test_a_group_should_run_when_it_is_first_on_all_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_two(monkeypatch)
    single, pair = rig.begin_steps("single", steps=1), rig.begin_steps("pair")
    assert pair.devices == (0, 1)
    for checks in rig.checks(9):
        assert pair.work_id not in checks, "its second member is still busy with another work"
    rig.handle(WorkFinished(single.work_id, NS_PER_S))
    rig.handle(WorkFinished(rig.works[-1].work_id, NS_PER_S))
    assert rig.checks(5)[-1] == [pair.work_id]


def test_a_work_on_an_idle_device_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_two(monkeypatch)
    first = rig.begin_steps("moving", steps=2)
    for _ in range(3):
        assert rig.checks(4) == [[]] * 4, "the second chunk is the first work of its device, but has no state yet"
        rig.watchdog.on_progress(first.work_id)
    rig.handle(WorkFinished(first.work_id, 100 * NS_PER_MS))
    assert rig.checks(5)[-1] == [first.work_id + 1]


def test_the_survivors_of_a_group_may_be_stuck_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_two(monkeypatch)
    pair = rig.begin_steps("pair")
    rig.handle(DeviceLost(1, "killed"))
    assert rig.checks(5)[-1] == [pair.work_id]


def test_idle_devices_are_not_suspected_and_ended_works_are_forgotten() -> None:
    rig = Rig()
    rig.begin_steps(steps=1)
    rig.checks(3)
    while works := rig.controller.tracker.devices[0].works:
        rig.handle(WorkFinished(works[0].work_id, NS_PER_S))
    assert rig.checks(9) == [[]] * 9
    assert not rig.watchdog._quiet
    rig.watchdog.on_progress(rig.works[0].work_id)


def test_time_is_counted_in_ticks_not_by_a_clock() -> None:
    """A machine that was suspended wakes up with works that began hours ago."""
    rig = Rig()
    rig.begin_steps()
    for _ in range(4):
        rig.now_ns += 3600 * NS_PER_S
        rig.controller.tracker.set_time(rig.now_ns)
        assert rig.watchdog.check() == []


def test_a_load_ahead_of_need_that_does_not_end_costs_its_device() -> None:
    """Predicted to take a second, it may take ten: nothing waits for it, so only this frees the device."""
    rig = Rig()
    device = rig.controller.tracker.devices[0]
    device.add_load(
        PendingLoad(
            load_id=1,
            work_id=NO_WORK,
            components=(),
            source=LoadSource.DISK,
            forgets=(),
            left_ns=NS_PER_S,
            is_measured=True,
        )
    )
    checks = [rig.watchdog.check_loads() for _ in range(12)]
    assert checks == [[]] * 11 + [[(0, 10 * NS_PER_S)]]
    device.end_load(1)
    assert [rig.watchdog.check_loads() for _ in range(20)] == [[]] * 20
