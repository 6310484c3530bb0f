"""What devices and hosts drop first under the lookahead policy: what is expected to be missed least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders import shipped, simulate
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.policy import ClusterView
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Start
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.residency import ComponentRates, Eviction, LoadingAhead

TABLE = shipped("gentd26")
FORGETFUL = replace(TABLE, host_bytes=0)
"""Every load comes from storage."""
COSTS = TableCosts(TABLE)
A, B, C, D = (COSTS.weights.components(COSTS.graph(f"gentd26-0{rank}").stages[0])[0] for rank in (1, 2, 3, 4))
STAGE = COSTS.graph("gentd26-04").stages[0]


def wanted(rank: int, at_s: float, uid: str = "", slo_s: float | None = 500.0) -> Request:
    return Request(
        uid=uid or f"{rank} at {at_s}",
        pipeline=f"gentd26-{rank:02}",
        shape=Shape(512, 512),
        steps=30,
        arrival_ns=ns_from_s(at_s),
        deadline_ns=None if slo_s is None else ns_from_s(at_s + slo_s),
    )


def rates(*requests: Request) -> ComponentRates:
    learned = ComponentRates()
    for one in sorted(requests, key=lambda one: one.arrival_ns):
        learned.add(one, COSTS)
    return learned


# How often components are asked for.


def test_a_steady_rate_is_learned_whether_it_began_just_now_or_hours_ago() -> None:
    for num in (60, 2000):
        learned = rates(*(wanted(1, 10.0 * index) for index in range(num)))
        assert learned.per_s(A, ns_from_s(10.0 * num)) == pytest.approx(0.1, rel=0.1)
    assert learned.per_s(B, ns_from_s(20000.0)) == 0


def test_those_who_asked_just_now_count_more_for_minutes_and_the_popular_for_hours() -> None:
    popular = [wanted(1, 120.0 * index) for index in range(30)]
    learned = rates(*popular, wanted(2, 3600.0), wanted(2, 3610.0), wanted(2, 3620.0), wanted(2, 3630.0))
    soon, later = ns_from_s(3640.0), ns_from_s(4500.0)
    assert learned.per_s(B, soon) > learned.per_s(A, soon)
    assert learned.per_s(B, later) < learned.per_s(A, later)


def test_a_request_counts_once_however_often_it_is_asked_about() -> None:
    one, two, same_time = wanted(1, 0.0), wanted(1, 50.0), wanted(1, 50.0, "other")
    learned = rates(one, two, two, same_time, two)
    learned.add(one, COSTS)
    assert learned.per_s(A, ns_from_s(50.0)) == rates(one, two, same_time).per_s(A, ns_from_s(50.0))


# What goes first.


@dataclass
class View:
    """Devices of one node by what they have, and its host."""

    memories: Sequence[tuple[Component, ...]]
    host: tuple[Component, ...] = ()
    jobs: Sequence[Any] = ()
    works: dict[int, list[Any]] = field(default_factory=dict)
    total_bytes: int | None = None

    @property
    def devices(self) -> list[Any]:
        return [
            SimpleNamespace(
                device_id=index,
                node=0,
                pool=0,
                memory=Memory(self.total_bytes, there),
                works=self.works.get(index, []),
                is_loading=False,
            )
            for index, there in enumerate(self.memories)
        ]

    def device(self, device_id: int) -> Any:
        return self.devices[device_id]

    def on_node(self, node: int) -> list[Any]:
        return self.devices

    @property
    def sources(self) -> View:
        return self

    def kept(self, node: int) -> tuple[Component, ...]:
        return self.host

    def load_ns(self, device_id: int, stage: object) -> int:
        return int(D not in self.memories[device_id])

    def promised(self) -> list[Any]:
        return [job for job in self.jobs if job.promised is not None]

    def job(self, job_id: int) -> Any:
        return next((job for job in self.jobs if job.job_id == job_id), None)


def eviction(view: View, learned: ComponentRates, at_s: float = 100.0) -> Eviction:
    return Eviction(learned, cast(ClusterView, view), COSTS, ns_from_s(at_s))


OFTEN = rates(*(wanted(1, float(index)) for index in range(9)), wanted(2, 10.0), wanted(2, 11.0), wanted(3, 12.0))
"""A nine times, B twice, C once."""


def test_what_is_asked_for_least_goes_first() -> None:
    order = eviction(View([(A, C, B)], (B, A, C)), OFTEN).order((0,), STAGE)
    assert order.device == order.host == (C, B, A)


def test_what_the_host_has_costs_a_device_less() -> None:
    """A load takes 3.4 s from the host, and 32.8 s from storage."""
    assert eviction(View([(A, B)], (A,)), OFTEN).order((0,), STAGE).device == (A, B)


def test_what_another_device_has_is_missed_less() -> None:
    assert eviction(View([(B, C), (B,)]), OFTEN).order((0,), STAGE).device == (B, C)
    assert eviction(View([(B,), ()], (B, C)), OFTEN).order((1,), STAGE).host == (B, C)
    assert eviction(View([(B, C), ()], (B, C)), OFTEN).order((1,), STAGE).host == (C, B), "both are on the device"


def test_what_the_device_drops_for_a_load_is_no_copy_for_the_host() -> None:
    """The device has room for one. B is asked for twice, and C once."""
    view = View([(B,), (A,)], (B, C), total_bytes=B.num_bytes)
    assert eviction(view, OFTEN).order((0,), STAGE).host == (C, B, A)
    assert eviction(view, OFTEN).order((1,), STAGE).host == (B, C, A)


def test_per_byte_of_room_the_cheapest_goes_first() -> None:
    """Ten times as large, it takes ten times as long to load: only how often it is asked for counts."""
    large = replace(A, num_bytes=10 * A.num_bytes)
    learned = ComponentRates(_asked={large: OFTEN._asked[B], B: OFTEN._asked[A]}, _first_ns=0)
    assert eviction(View([(B, large)]), learned).order((0,), STAGE).device == (large, B)


def start(*devices: int, job_id: int = 0) -> Start:
    return Start(stage=STAGE, job_ids=(job_id,), devices=devices, num_steps=1, why="")


def job(job_id: int, rank: int, *reserved: int) -> Any:
    block = SimpleNamespace(devices=reserved) if reserved else None
    return SimpleNamespace(job_id=job_id, left=COSTS.start(wanted(rank, 0.0)), promised=block)


def test_what_is_certain_to_be_needed_goes_last() -> None:
    """C is asked for least. A job runs with it, begins with it, or is promised to run with it on this device."""
    runs = View([(A, C)], jobs=[job(0, 4), job(1, 3)], works={0: [SimpleNamespace(job_ids=(1,))]})
    promised, elsewhere = (View([(A, C), ()], jobs=[job(0, 4), job(1, 3, device)]) for device in (0, 1))
    begins = View([(A, C)], jobs=[job(0, 3)])
    for view, first in ((runs, A), (promised, A), (begins, A), (elsewhere, C)):
        (ordered,) = eviction(view, OFTEN).ordered([start(0)])
        assert ordered.drop_order.device[0] == first


def test_a_start_that_loads_nothing_stays_as_it_is() -> None:
    loads, has_all = start(0), start(1, job_id=1)
    view = View([(A, C), (A, D)], jobs=[job(0, 4), job(1, 4)])
    ordered = eviction(view, OFTEN).ordered([loads, has_all])
    assert [bool(one.drop_order.device) for one in ordered] == [True, False]
    assert eviction(view, OFTEN).ordered([has_all]) == [has_all]


def test_a_node_does_one_load_ahead_at_a_time() -> None:
    view = View([(A,), ()], (A,))
    devices, now = view.devices, eviction(view, rates(*(wanted(1, 5.0 * index) for index in range(40))), 200.0)
    (load,) = LoadingAhead().best(now, devices, devices[1:])
    assert (load.device_id, COSTS.weights.components(load.stage)) == (1, (A,))
    devices[0].is_loading = True
    assert not LoadingAhead().best(now, devices, devices[1:])


def test_a_popular_checkpoint_outlasts_one_that_was_used_after_it() -> None:
    """A device has room for two. By recency the popular one would go for the third, and be read again."""
    requests = [wanted(1, 50.0 * index) for index in range(10)] + [wanted(2, 500.0), wanted(3, 550.0), wanted(1, 620.0)]
    trace = simulate(requests, "tilework", num_devices=1, costs=FORGETFUL)
    assert len(trace.loads) == 3


def test_speeds_that_are_corrected_change_the_order() -> None:
    """Where reading is as quick as a load from the host, a copy there is worth nothing."""
    costs, view = TableCosts(TABLE), View([(A, B)], (A,))
    for _ in range(60):
        costs.weights.observe(A.num_bytes, LoadSource.DISK, 3 * NS_PER_S)
    order = Eviction(OFTEN, cast(ClusterView, view), costs, ns_from_s(100.0)).order((0,), STAGE)
    assert order.device == (B, A)
