"""Reads ahead of need: what hosts read while their devices work, and what loads of it wait for."""

from __future__ import annotations

from dataclasses import replace

from builders import PIPELINE, Idle, only, table
from scripted import start
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.control.cluster.tracker import Tracker
from tilework.control.components import Components
from tilework.core.actions import LoadComponents, ReadComponents
from tilework.core.component import Component, LoadSource
from tilework.core.events import ComponentsLoaded, ComponentsRead, DeviceJoined
from tilework.core.graph.stage import Stage
from tilework.core.time import NS_PER_S
from tilework.core.work import Member, ReadAhead, Work
from tilework.cost.table_costs import TableCosts

TEXT, DENOISER, VAE = Component("text", 2), Component("denoiser", 5), Component("vae", 1)
COSTS = replace(
    table(),
    components={PIPELINE: {"text_encoder": TEXT, "denoiser": DENOISER, "vae": VAE}},
    memory_bytes=6,
    host_bytes=6,
    load_bytes_per_s={LoadSource.DISK: 1.0, LoadSource.HOST: 4.0},
)
"""A byte takes one second from the disk, and a quarter from the host."""


def work(work_id: int, stage: Stage) -> Work:
    return Work(
        work_id=work_id,
        stage=stage,
        members=(Member(0, 1, 0, 0),),
        devices=(0,),
        num_steps=1,
        why="a test",
    )


class Cluster:
    """A tracker of two nodes with one device each, and what reads and loads there."""

    def __init__(self) -> None:
        self.costs = TableCosts(COSTS)
        self.tracker = Tracker(Idle(), self.costs)
        self.components = Components(self.costs, self.tracker)
        for device_id in (0, 1):
            self.components.join(DeviceJoined(device_id, device_id, memory_bytes=6))

    def read(self, stage: str, *forgets: Component, node: int = 0) -> ReadComponents | None:
        read = ReadAhead(node=node, stage=stage_of(PIPELINE, stage), forgets=forgets)
        actions = self.components.read_ahead(read, self.tracker.devices[0].now.ns)
        return only(ReadComponents, tuple(actions))[0] if actions else None

    def load(self, stage: str, device_id: int = 0) -> tuple[LoadComponents, int]:
        """The load before a work, and its predicted time, which policies are told as well."""
        predicted_ns = self.tracker.sources.load_ns(device_id, stage_of(PIPELINE, stage))
        actions = self.components.prepare(start(stage, device_id), 1)
        assert self.tracker.devices[device_id].load_ns(1) == predicted_ns
        return only(LoadComponents, tuple(actions))[0], predicted_ns

    def end(self, read: ReadComponents | None, *, is_kept: bool = True) -> None:
        assert read is not None
        self.components.on_report(ComponentsRead(read.read_id, is_kept))


def test_a_host_reads_once_at_a_time_and_has_it_then() -> None:
    cluster = Cluster()
    read = cluster.read(DIFFUSE)
    assert read is not None
    assert (read.node, read.components, read.num_bytes) == (0, ("denoiser",), 5)
    assert [cluster.tracker.sources.may_read(node) for node in (0, 1)] == [False, True]
    assert not cluster.tracker.sources.kept(0)
    cluster.end(read)
    assert cluster.tracker.sources.may_read(0)
    assert cluster.tracker.sources.kept(0) == (DENOISER,)
    assert cluster.read(DIFFUSE) is None, "it has it"


def test_what_a_device_of_the_node_has_is_not_read() -> None:
    cluster = Cluster()
    load, predicted_ns = cluster.load(ENCODE)
    assert cluster.read(ENCODE) is None, "the device is reading it"
    cluster.components.on_report(ComponentsLoaded(load.load_id, 0, predicted_ns))
    assert cluster.read(ENCODE) is None
    assert cluster.read(ENCODE, node=1) is not None


def test_a_load_waits_for_the_read_and_then_comes_from_the_host() -> None:
    """Five seconds for the read, of which two are over, and 5 / 4 for the load."""
    cluster = Cluster()
    read = cluster.read(DIFFUSE)
    cluster.tracker.set_time(2 * NS_PER_S)
    load, predicted_ns = cluster.load(DIFFUSE)
    assert (load.source, predicted_ns) == (LoadSource.HOST, int(4.25 * NS_PER_S))
    assert not cluster.tracker.sources.kept(0), "it is not there yet"
    cluster.end(read)
    cluster.components.on_report(ComponentsLoaded(load.load_id, 0, 40 * NS_PER_S))
    assert cluster.costs.weights.load_ns(5, LoadSource.HOST) == int(1.25 * NS_PER_S), (
        "the wait says nothing of the host's speed"
    )
    assert cluster.load(DIFFUSE, 1)[0].source is LoadSource.DISK, "another host has not read it"


def test_a_device_that_is_free_later_waits_less() -> None:
    cluster = Cluster()
    cluster.read(DIFFUSE)
    device = cluster.tracker.devices[0]
    device.push(work(1, stage_of(PIPELINE, ENCODE)), 3 * NS_PER_S)
    assert cluster.tracker.sources.load_ns(0, stage_of(PIPELINE, DIFFUSE)) == int((2 + 1.25) * NS_PER_S)
    device.push(work(2, stage_of(PIPELINE, ENCODE)), 9 * NS_PER_S)
    assert cluster.tracker.sources.load_ns(0, stage_of(PIPELINE, DIFFUSE)) == int(1.25 * NS_PER_S)


def test_the_host_forgets_what_the_read_names() -> None:
    cluster = Cluster()
    for stage in (ENCODE, DECODE):
        cluster.end(cluster.read(stage))
    assert cluster.tracker.sources.kept(0) == (TEXT, VAE)
    read = cluster.read(DIFFUSE, VAE, TEXT)
    assert read is not None
    assert read.forgets == ("vae", "text")
    cluster.end(read)
    assert cluster.tracker.sources.kept(0) == (DENOISER,), "it has six bytes"


def test_what_could_not_be_read_is_named() -> None:
    cluster = Cluster()
    before = [device.num_changes for device in cluster.tracker.devices]
    cluster.end(cluster.read(DIFFUSE), is_kept=False)
    assert cluster.tracker.sources.unreadable == {DENOISER}
    assert not cluster.tracker.sources.kept(0)
    assert cluster.load(DIFFUSE)[0].source is LoadSource.DISK
    changes = [device.num_changes - old for device, old in zip(cluster.tracker.devices, before, strict=True)]
    assert changes == [1, 0], "a policy looks at that node again"
