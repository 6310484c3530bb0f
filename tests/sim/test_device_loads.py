"""Simulated devices load and drop components in the order of their queues, and hosts read them."""

from __future__ import annotations

from builders import PIPELINE
from sim.devices import DENOISER, ENCODER, SMALL, Devices, begun, work
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.core.actions import DropComponents, LoadComponents
from tilework.core.component import Component, LoadSource
from tilework.sim.device import Hosts
from tilework.sim.fleet import Fleet
from tilework.sim.runs import LoadRun, RunEnd


def load(load_id: int, component: Component) -> LoadComponents:
    stage = stage_of(PIPELINE, DIFFUSE)
    return LoadComponents(load_id, 0, stage, (component.digest,), component.num_bytes, LoadSource.DISK)


def loading(fleet: Fleet, now_ns: int) -> LoadRun:
    (run,) = fleet.begin_next((0,), now_ns)
    assert isinstance(run, LoadRun)
    return run


def test_components_are_loaded_and_dropped_in_the_order_of_the_queue() -> None:
    fleet = Devices(1)
    fleet.needed = {ENCODE: (ENCODER,), DIFFUSE: (DENOISER,)}
    fleet.change_components(load(1, ENCODER), 0)
    fleet.command(work(1, stage=ENCODE, num_steps=1), 3)
    fleet.change_components(DropComponents(0, ("encoder",)), 0)
    fleet.change_components(load(2, DENOISER), 0)
    fleet.command(work(2), 5)
    first = loading(fleet, 10)
    assert (first.start_ns, first.end_ns) == (10, 16)
    assert fleet.begin_next((0,), 12) == [], "its components are on their way"
    assert fleet.end_load(first)
    encode = begun(fleet, 16)
    assert fleet.begin_next((0,), 18) == [], "what comes later waits for the run"
    fleet.end(encode)
    second = loading(fleet, 19)
    assert second.end_ns == 27, "the encoder has left room"
    assert fleet.end_load(second)
    assert begun(fleet, 27).work.work_id == 2
    assert fleet.num_overloads == 0


def test_a_load_without_memory_never_ends() -> None:
    fleet = Devices(1)
    fleet.change_components(load(1, ENCODER), 0)
    run = loading(fleet, 0)
    fleet.change_components(load(2, DENOISER), 0)
    assert fleet.begin_next((0,), 3) == []
    assert fleet.end_load(run) is None
    assert fleet.num_overloads == 1


def test_a_work_without_its_components_never_begins() -> None:
    fleet = Devices(1)
    fleet.needed = {DIFFUSE: (DENOISER,)}
    fleet.command(work(1), 5)
    assert fleet.begin_next((0,), 0) == []
    assert fleet.num_overloads == 1


def test_a_revoked_work_does_not_wait_for_its_load_which_goes_on_after_it() -> None:
    fleet = Devices(1)
    fleet.needed = {DIFFUSE: (DENOISER,)}
    one = work(1)
    fleet.change_components(load(1, DENOISER), 0)
    fleet.command(one, 5)
    run = loading(fleet, 0)
    assert fleet.stop(0, one, 3) is None
    revoked = begun(fleet, 3)
    assert (revoked.end, revoked.end_ns) == (RunEnd.STOPPED, 3)
    assert fleet.end_load(run) is None, "it was paused"
    fleet.end(revoked)
    whole = fleet.end_load(loading(fleet, 3))
    assert whole is not None
    assert (whole.start_ns, whole.end_ns, whole.dropped) == (0, 8, ())


def test_a_load_is_paused_for_a_work_that_needs_none_of_it() -> None:
    """The denoiser takes 8; 3 of them are done when a decode comes, which takes 4."""
    fleet = Devices(1)
    fleet.needed = {DIFFUSE: (DENOISER,)}
    fleet.change_components(load(1, DENOISER), 0)
    run = loading(fleet, 0)
    fleet.command(work(1, stage=DECODE, num_steps=1), 4)
    decode = begun(fleet, 3)
    assert decode.start_ns == 3
    assert fleet.end_load(run) is None
    fleet.end(decode)
    whole = fleet.end_load(loading(fleet, 7))
    assert whole is not None
    assert (whole.start_ns, whole.end_ns) == (4, 12), "as long as without a pause"


def test_what_a_work_waits_for_is_loaded_before_what_none_waits_for() -> None:
    fleet = Devices(1)
    fleet.needed = {DIFFUSE: (SMALL,)}
    fleet.change_components(load(1, DENOISER), 0)
    ahead = loading(fleet, 0)
    fleet.change_components(load(2, SMALL), 0)
    fleet.command(work(1), 5)
    first = loading(fleet, 3)
    assert (first.load.load_id, first.end_ns) == (2, 5)
    assert fleet.end_load(ahead) is None
    assert fleet.end_load(first)
    steps = begun(fleet, 5)
    fleet.end(steps)
    assert loading(fleet, 10).end_ns == 15, "5 of 8 are left"
    assert fleet.num_overloads == 0


def test_what_is_dropped_before_it_is_there_is_not_loaded() -> None:
    """After 3 of 8. There would be no room for the encoder beside it."""
    fleet = Devices(1)
    fleet.needed = {ENCODE: (ENCODER,)}
    fleet.change_components(load(1, DENOISER), 0)
    loading(fleet, 0)
    fleet.change_components(DropComponents(0, ("denoiser",)), 0)
    fleet.change_components(load(2, ENCODER), 0)
    fleet.command(work(1, stage=ENCODE, num_steps=1), 4)
    dropped = fleet.end_load(loading(fleet, 3))
    assert dropped is not None
    assert (dropped.load.load_id, dropped.end_ns, dropped.dropped) == (1, 3, ("denoiser",))
    assert fleet.end_load(loading(fleet, 3))
    assert begun(fleet, 9).work.work_id == 1
    assert fleet._devices[0].memory.components == (ENCODER,)
    assert fleet.num_overloads == 0


def test_a_lost_device_ends_no_load() -> None:
    fleet = Devices(1)
    fleet.change_components(load(1, ENCODER), 0)
    run = loading(fleet, 0)
    fleet.lose(0, 2)
    assert not fleet.end_load(run)


def test_what_a_host_has_forgotten_is_read_from_the_disk() -> None:
    """The host of devices 0 and 1 keeps two of these components; device 2 has another host."""
    fleet, number = Devices(hosts=Hosts(lambda device_id: device_id // 2, host_bytes=2)), 0
    fleet.named = {name: Component(name, 1) for name in "abc"}

    def load(name: str, device_id: int = 0, source: LoadSource = LoadSource.HOST, forgets: str = "") -> str:
        nonlocal number
        number += 1
        stage = stage_of(PIPELINE, DIFFUSE)
        fleet.change_components(DropComponents(device_id, (name,)), device_id)
        fleet.change_components(LoadComponents(number, device_id, stage, (name,), 1, source, tuple(forgets)), device_id)
        (begun,) = fleet.begin_next((device_id,), 0)
        assert isinstance(begun, LoadRun)
        assert fleet.end_load(begun)
        return fleet.timing.sources[-1]

    assert load("a") == "disk", "nothing has been read there"
    assert load("b", source=LoadSource.DISK) == "disk"
    assert [load("a", 1), load("b", 1)] == ["host", "host"]
    assert load("a", 2) == "disk", "it is on another host"
    assert [load("a"), load("c", source=LoadSource.DISK)] == ["host", "disk"], "b is forgotten for c"
    assert [load("b", 1), load("c", 1)] == ["disk", "host"]
    assert load("a", source=LoadSource.DISK, forgets="xc") == "disk"
    assert [load("b", 1), load("c", 1)] == ["host", "disk"], "what the load named went first, though it was used last"


def test_a_load_waits_for_what_its_host_is_reading() -> None:
    """The host has `a` at 50, which it begins to read at 0; of `b` it reads nothing."""
    hosts = Hosts(lambda _: 0)
    fleet = Devices(hosts=hosts)
    fleet.named = {name: Component(name, 3) for name in "ab"}
    hosts.reading[0] = frozenset("a"), 50
    ends = []
    for device_id, name in enumerate("ab"):
        load = LoadComponents(device_id, device_id, stage_of(PIPELINE, DIFFUSE), (name,), 3, LoadSource.HOST)
        fleet.change_components(load, device_id)
        (begun,) = fleet.begin_next((device_id,), 10)
        ends.append(begun.end_ns)
    assert ends == [53, 13]
    assert fleet.timing.sources == ["host", "disk"]
