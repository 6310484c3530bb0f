"""Which devices are open, found by a look at all of them, and by a look at those that have changed."""

from __future__ import annotations

from random import Random

import pytest

from builders import PIPELINE
from stages import DIFFUSE, stage_of
from tilework.control.cluster.device import Device, Now
from tilework.core.time import NS_PER_MS
from tilework.core.work import Member, Work
from tilework.policy.toolkit.open_devices import DeviceChanges, OpenDevices, is_open, next_open_ns


def work(work_id: int, device_id: int) -> Work:
    return Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, DIFFUSE),
        members=(Member(work_id, 1, 1, 0),),
        devices=(device_id,),
        num_steps=1,
        why="a test",
    )


@pytest.mark.parametrize("seed", range(20))
def test_devices_are_open_as_if_all_were_looked_at(seed: int) -> None:
    """Works of 1 to 60 ms begin, end late or early and are shortened; now and then a device loads, joins or is lost."""
    rng, now, num_works, num_open = Random(seed), Now(), 0, 0
    devices = tuple(Device(device_id=index, node=index // 4, pool=0, now=now) for index in range(8))
    found = OpenDevices()
    for _ in range(300):
        now.ns += rng.randrange(8 * NS_PER_MS)
        device = rng.choice(devices)
        match rng.randrange(6):
            case 0 | 1:
                if len(device.works) < 3:
                    num_works += 1
                    run_ns = rng.randrange(NS_PER_MS, 60 * NS_PER_MS)
                    device.push(work(num_works, device.device_id), device.free_ns + run_ns)
            case 2 | 3:
                if device.works:
                    device.pop(rng.choice(device.works))
            case 4:
                if device.works:
                    device.shorten(rng.choice(device.works), rng.randrange(5 * NS_PER_MS))
            case 5 if rng.random() < 0.2:
                devices = tuple(rng.sample(devices, 7)) if len(devices) == 8 else (*devices, spare(devices, now))
                devices = tuple(sorted(devices, key=lambda one: one.device_id))
        found.update(devices, now.ns)
        expected = [one for one in devices if is_open(one, now.ns)]
        assert found.open() == expected, f"seed {seed}"
        assert found.has_open == bool(expected)
        assert found.next_open_ns() == next_open_ns(devices, now.ns), f"seed {seed}"
        assert found.by_id == {one.device_id: one for one in devices}
        num_open += len(expected)
    assert 300 < num_open < 300 * 7, "some are open, not all"


def spare(devices: tuple[Device, ...], now: Now) -> Device:
    (missing,) = set(range(8)) - {one.device_id for one in devices}
    return Device(device_id=missing, node=missing // 4, pool=0, now=now)


def test_changes_are_those_since_the_latest_call() -> None:
    devices = tuple(Device(device_id=index, node=0, pool=0) for index in range(3))
    changes = DeviceChanges()
    assert not changes.are_of(devices)
    assert changes.among(devices) == devices
    assert changes.are_of(devices)
    assert not changes.among(devices)
    devices[1].push(work(1, 1), 5)
    assert changes.among(devices) == [devices[1]]
    assert not changes.among(devices)
    assert changes.among(devices[:2]) == devices[:2], "other devices"
