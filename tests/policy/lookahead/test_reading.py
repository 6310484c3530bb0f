"""What hosts read ahead of need under the lookahead policy: for jobs that wait, and by how often it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders import shipped, simulate
from policy.lookahead.test_preloading import COSTS as TABLE
from policy.lookahead.test_preloading import wanted
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.policy import ClusterView
from tilework.core.request import Request
from tilework.core.time import ns_from_s
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.residency import ComponentRates, Eviction, Reading
from tilework.sim.trace import Trace

COSTS = TableCosts(replace(TABLE, host_bytes=2 * TABLE.components["gentd26-01"]["checkpoint"].num_bytes))
"""The host has room for two checkpoints."""
A, B, C, D = (COSTS.table.components[f"gentd26-{rank:02}"]["checkpoint"] for rank in (1, 2, 3, 4))


@dataclass
class View:
    """One device, what it has, and its host."""

    memory: tuple[Component, ...] = ()
    host: tuple[Component, ...] = ()
    unreadable: set[Component] = field(default_factory=set)
    reads: bool = False

    @property
    def devices(self) -> list[Any]:
        return [SimpleNamespace(device_id=0, node=0, memory=Memory(None, self.memory))]

    def on_node(self, node: int) -> list[Any]:
        return self.devices

    @property
    def sources(self) -> View:
        return self

    def kept(self, node: int) -> tuple[Component, ...]:
        return self.host

    def may_read(self, node: int) -> bool:
        return not self.reads


def job(job_id: int, rank: int, urgency_ns: int) -> Any:
    return SimpleNamespace(job_id=job_id, left=COSTS.start(wanted(rank, 0.0)), urgency_ns=urgency_ns)


def chosen(view: View, waiting: Sequence[Any] = (), learned: ComponentRates | None = None) -> str | None:
    """The pipeline that is read for, if any."""
    eviction = Eviction(learned or ComponentRates(), cast(ClusterView, view), COSTS, ns_from_s(100.0))
    reads = Reading().best(eviction, 0, waiting)
    return reads[0].stage.pipeline if reads else None


def rates(*requests: Request) -> ComponentRates:
    learned = ComponentRates()
    for one in requests:
        learned.add(one, COSTS)
    return learned


def test_the_most_urgent_job_that_lacks_something_is_read_for() -> None:
    waiting = [job(0, 3, 30), job(1, 2, 20), job(2, 1, 10)]
    assert chosen(View(), waiting) == "gentd26-01"
    assert chosen(View(host=(A,)), waiting) == "gentd26-02"
    assert chosen(View(memory=(A,), host=(B,)), waiting) == "gentd26-03", "a device has A"
    assert chosen(View(host=(B, A)), waiting[1:]) is None


def test_what_an_earlier_job_needs_is_not_forgotten_for_a_later_one() -> None:
    """The host has two; a third makes it forget one."""
    assert chosen(View(host=(A, B)), [job(0, 1, 10), job(1, 2, 20), job(2, 3, 30)]) is None
    assert chosen(View(host=(A, D)), [job(0, 1, 10), job(2, 3, 30)], rates(wanted(1, 0.0))) == "gentd26-03"


def test_nothing_is_read_while_the_host_reads_or_where_that_has_failed() -> None:
    waiting = [job(0, 1, 10), job(1, 2, 20)]
    assert chosen(View(reads=True), waiting) is None
    assert chosen(View(unreadable={A}), waiting) == "gentd26-02"


def test_what_is_asked_for_often_is_read_for_nobody() -> None:
    often = rates(*(wanted(1, 5.0 * index) for index in range(20)))
    assert chosen(View(), (), often) == "gentd26-01"
    assert chosen(View(host=(A,)), (), often) is None
    assert chosen(View(), (), ComponentRates()) is None
    alike = rates(*(wanted(rank, 5.0 * index) for index in range(30) for rank in (1, 2, 3)))
    assert chosen(View(host=(A, B)), (), alike) is None, "what it would push out is asked for as often"


def waits(trace: Trace) -> float:
    """How long the device loads for the second of two requests, in seconds."""
    (load,) = [one for one in trace.loads if one.load.components == ("gentd26-02",)]
    assert load.load.source is LoadSource.HOST
    return (load.end_ns - load.start_ns) / 1e9


@pytest.mark.parametrize("at_s", [34.0, 60.0])
def test_a_host_reads_for_a_job_that_waits_while_the_device_works(at_s: float) -> None:
    """The device reads for the first request until 32.8 s, and works until about 90 s. A read takes 32.8 s."""
    costs = shipped("gentd26")
    first = replace(wanted(1, 0.0), steps=200)
    trace = simulate([first, wanted(2, at_s)], "tilework", num_devices=1, costs=costs)
    begun_ns = min(run.start_ns for run in trace.runs if run.work.stage.pipeline == "gentd26-02")
    alone = simulate([first], "tilework", num_devices=1, costs=costs)
    end_ns = max(run.end_ns for run in alone.runs)
    wait_ns = max(0, ns_from_s(at_s + 32.8) - end_ns)
    assert begun_ns == pytest.approx(end_ns + wait_ns + ns_from_s(3.4), abs=ns_from_s(0.5))
    assert waits(trace) == pytest.approx(3.4 + wait_ns / 1e9, abs=0.5)


def test_a_host_reads_nothing_ahead_that_none_of_its_devices_serves() -> None:
    learned = ComponentRates()
    for index in range(40):
        learned.add(wanted(1, float(index)), COSTS)
    assert chosen(View(), learned=learned) == "gentd26-01"
    elsewhere = TableCosts(replace(COSTS.table, devices={"gentd26-01": (5,)}))
    devices = [SimpleNamespace(device_id=device_id, node=device_id // 4, memory=Memory()) for device_id in (0, 5)]
    view = SimpleNamespace(
        devices=devices,
        on_node=lambda node: [one for one in devices if one.node == node],
        sources=SimpleNamespace(kept=lambda _node: (), may_read=lambda _node: True, unreadable=()),
    )
    eviction = Eviction(learned, cast(ClusterView, view), elsewhere, ns_from_s(100.0))
    assert not Reading().best(eviction, 0, ())
    assert [read.node for read in Reading().best(eviction, 1, ())] == [1]
