"""What a device still has to load: for which work, how long it takes, and what is dropped of it before it is there."""

from __future__ import annotations

from builders import PIPELINE
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.control.cluster.device import NO_WORK, Device, PendingLoad
from tilework.core.component import Component, LoadSource
from tilework.core.graph.stage import Stage
from tilework.core.work import Member, Work

TEXT, DENOISER, VAE = Component("text", 2), Component("denoiser", 5), Component("vae", 1)
NEEDED = {ENCODE: (TEXT,), DIFFUSE: (DENOISER,), DECODE: (VAE,)}


def loading(*components: Component, work_id: int = NO_WORK) -> Device:
    """A device that has just begun a load, of a unit of time per byte."""
    device = Device(device_id=0, node=0, pool=0)
    device.add_load(
        PendingLoad(
            load_id=1,
            work_id=work_id,
            components=components,
            source=LoadSource.DISK,
            forgets=(),
            left_ns=sum(one.num_bytes for one in components),
            is_measured=True,
        )
    )
    return device


def work(work_id: int, stage: str) -> Work:
    return Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, stage),
        members=(Member(0, 1, 0, 0),),
        devices=(0,),
        num_steps=1,
        why="a test",
    )


def needed(stage: Stage) -> tuple[Component, ...]:
    return NEEDED[stage.name]


def test_it_goes_on_while_the_device_has_no_works() -> None:
    device = loading(DENOISER)
    device.now.ns = 2
    assert (device.idle_ns, device.free_ns) == (2, 5)
    device.push(work(1, DECODE), 12)
    device.now.ns = 10
    assert (device.idle_ns, device.free_ns) == (12, 15), "it is paused"
    device.now.ns = 12
    device.pop(device.works[0])
    device.now.ns = 20
    assert (device.free_ns, device.ahead_ns()) == (20, 0), "it takes longer than predicted"


def test_what_is_dropped_takes_no_time_and_the_rest_tells_no_speed() -> None:
    device = loading(TEXT, DENOISER)
    device.leave_out((DENOISER, VAE))
    assert [device.ahead_ns(wanted) for wanted in (None, (TEXT,), (DENOISER,))] == [2, 2, 0]
    load = device.end_load(1)
    assert load is not None
    assert (load.components, load.is_measured) == ((TEXT,), False)
    assert device.end_load(1) is None


def test_the_next_work_that_needs_it_waits_for_the_load_of_one_that_has_not_run() -> None:
    """The first steps are revoked after 2 of 5; the second ones run after the decode, which needs nothing of it."""
    device = loading(DENOISER, work_id=1)
    works = [work(1, DIFFUSE), work(2, DECODE), work(3, DIFFUSE)]
    for one, end_ns in zip(works, (15, 16, 26), strict=True):
        device.push(one, end_ns)
    device.now.ns = 2
    device.release_loads(works[0], needed, has_run=False)
    device.pop(works[0])
    assert (device.is_loading, device.load_ns(3)) == (False, 3)
    assert [device.end_ns(one) for one in works[1:]] == [3, 16]
    device.release_loads(works[2], needed, has_run=False)
    assert device.is_loading, "now no work needs it"


def test_what_a_work_has_used_is_there() -> None:
    device = loading(DENOISER, work_id=1)
    one = work(1, DIFFUSE)
    device.push(one, 15)
    assert device.lacks_something
    device.release_loads(one, needed, has_run=True)
    device.pop(one)
    assert (device.lacks_something, device.is_loading, device.free_ns) == (False, False, 0)
