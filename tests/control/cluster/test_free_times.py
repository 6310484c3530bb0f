"""When devices are free, kept up to date, against a walk over all devices."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from builders import PIPELINE
from stages import DIFFUSE, stage_of
from tilework.control.cluster.device import NO_WORK, Device, Now, PendingLoad
from tilework.control.cluster.free_times import FreeTimes
from tilework.core.component import Component, LoadSource
from tilework.core.work import Member, Work

WEIGHTS = Component("weights", 9)


def work(work_id: int) -> Work:
    return Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, DIFFUSE),
        members=(Member(0, 1, 1, 0),),
        devices=(0,),
        num_steps=1,
        why="a test",
    )


def load(number: int, work_id: int, left_ns: int) -> PendingLoad:
    return PendingLoad(
        load_id=number,
        work_id=work_id,
        components=(WEIGHTS,),
        source=LoadSource.DISK,
        forgets=(),
        left_ns=left_ns,
        is_measured=True,
    )


class Changing:
    """Devices to which something happens at random: works and loads begin and end, time passes, devices come and go."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.count = rng, Now(), 0
        self.times = FreeTimes(self.now)
        self.devices: list[Device] = []

    def act(self) -> None:
        acts: list[Callable[[Device], None]] = [self.begin] * 3 + [self.end, self.end, self.shorten]
        acts += [self.load, self.loaded, self.await_load, self.leave_out, self.released, self.lose]
        if not self.devices or self.rng.random() < 0.1:
            self.join()
        elif self.rng.random() < 0.2:
            self.now.ns += self.rng.randrange(30)
        else:
            self.rng.choice(acts)(self.rng.choice(self.devices))

    def join(self) -> None:
        self.count += 1
        device = Device(device_id=self.count, node=0, pool=0, now=self.now)
        self.times.add(device)
        self.devices.append(device)

    def lose(self, device: Device) -> None:
        if self.rng.random() < 0.2:
            self.devices.remove(device)
            self.times.remove(device)

    def begin(self, device: Device) -> None:
        self.count += 1
        device.push(work(self.count), device.idle_ns + self.rng.randrange(40))

    def end(self, device: Device) -> None:
        if device.works:
            device.pop(self.rng.choice(device.works))

    def shorten(self, device: Device) -> None:
        if device.works:
            device.shorten(self.rng.choice(device.works), self.rng.randrange(20))

    def load(self, device: Device) -> None:
        self.count += 1
        first = device.works[0].work_id if device.works else NO_WORK
        device.add_load(load(self.count, self.rng.choice((NO_WORK, first)), self.rng.randrange(40)))

    def loaded(self, device: Device) -> None:
        if device.loads:
            device.end_load(self.rng.choice(list(device.loads)))

    def await_load(self, device: Device) -> None:
        if device.works:
            device.await_loads(device.works[0].work_id, (WEIGHTS,))

    def leave_out(self, device: Device) -> None:
        device.leave_out((WEIGHTS,))

    def released(self, device: Device) -> None:
        if device.works:
            needed = (WEIGHTS,) if self.rng.random() < 0.5 else ()
            device.release_loads(device.works[0], lambda _: needed, has_run=self.rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_they_are_those_of_a_walk_over_all_devices_whatever_happens_to_these(seed: int) -> None:
    changing = Changing(Random(seed))
    seen: dict[tuple[int, int | None], list[int]] = {}
    for _ in range(400):
        changing.act()
        times, now_ns = changing.times, changing.now.ns
        expected = sorted(device.free_ns for device in changing.devices)
        assert times.ascending() == expected
        assert times.taken_ns() == sum(expected) - len(expected) * now_ns
        moment = times.num_changes, None if times.is_fixed else now_ns
        assert seen.setdefault(moment, expected) == expected, "something has changed, and the count has not"


def test_they_stay_while_all_devices_work_and_none_is_late() -> None:
    now, device = Now(5), Device(device_id=0, node=0, pool=0)
    device.now, times = now, FreeTimes(now)
    times.add(device)
    assert not times.is_fixed, "it is free now"
    device.push(work(1), 20)
    now.ns = 20
    assert times.is_fixed
    assert times.ascending() == [20]
    now.ns = 21
    assert not times.is_fixed, "it is late"
    assert (times.ascending(), times.taken_ns()) == ([21], 0)
