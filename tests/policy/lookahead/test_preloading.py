"""What idle devices load ahead of need under the lookahead policy, and requests that come meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from builders import shipped, simulate
from tilework.core.component import LoadSource
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead import residency
from tilework.policy.lookahead.node_jobs import is_idle
from tilework.policy.lookahead.policy import LookaheadPolicy
from tilework.sim.runs import LoadRun
from tilework.sim.trace import Trace

COSTS = shipped("gentd26")
FORGETFUL = replace(COSTS, host_bytes=0)
"""Every load comes from storage, and takes 32.8 s."""


def wanted(rank: int, at_s: float, slo_s: float = 500.0) -> Request:
    arrival_ns = ns_from_s(at_s)
    return Request(
        uid=f"{rank} at {at_s}",
        pipeline=f"gentd26-{rank:02}",
        shape=Shape(512, 512),
        steps=30,
        arrival_ns=arrival_ns,
        deadline_ns=arrival_ns + ns_from_s(slo_s),
    )


def ahead(trace: Trace) -> list[LoadRun]:
    return [load for load in trace.loads if load.load.is_ahead]


STREAM = [wanted(1, 60.0 * index) for index in range(8)]
"""Of one checkpoint, each after the one before."""


def test_what_is_popular_comes_to_a_second_device() -> None:
    (load,) = ahead(simulate(STREAM, "tilework", num_devices=2, costs=COSTS))
    assert (load.load.device_id, load.load.components, load.load.source) == (1, ("gentd26-01",), LoadSource.HOST)
    assert not ahead(simulate(STREAM[:1], "tilework", num_devices=2, costs=COSTS)), "one request says little"


def test_stages_of_a_model_that_was_removed_are_no_candidates() -> None:
    policy, costs = LookaheadPolicy(), TableCosts(COSTS)
    for one in STREAM:
        policy.demand(one, costs.start(one), costs)
    eviction = SimpleNamespace(rates=policy._rates, costs=costs, now_ns=STREAM[-1].arrival_ns)
    devices: list[Any] = [SimpleNamespace(device_id=0)]
    assert [stage.pipeline for stage in residency.stages_by_rate(eviction, devices)] == ["gentd26-01"]  # type: ignore[arg-type]
    costs.remove("gentd26-01")
    assert residency.stages_by_rate(eviction, devices) == []  # type: ignore[arg-type]


def test_a_request_that_comes_meanwhile_waits_for_the_load() -> None:
    """The other device is busy for 7.5 s more; the load ends in 2 s."""
    (load,) = ahead(simulate(STREAM, "tilework", num_devices=2, costs=COSTS))
    at_s = load.start_ns / NS_PER_S + 1.4
    before = [one for one in STREAM if one.arrival_ns <= load.start_ns]
    trace = simulate([*before, wanted(1, at_s)], "tilework", num_devices=2, costs=COSTS)
    assert len(trace.loads) == 2
    last = max(trace.endings, key=lambda one: one.request.arrival_ns)
    begun_ns = min(run.start_ns for run in trace.runs if run.work.job_ids == (last.job_id,))
    assert begun_ns == load.end_ns


def test_a_request_that_needs_something_else_does_not_wait_for_the_load() -> None:
    """The load takes 2 s, and is paused after 1 s for a request that comes with a checkpoint of its own."""
    (load,) = ahead(simulate(STREAM, "tilework", num_devices=2, costs=COSTS))
    at_s = load.start_ns / NS_PER_S + 1.0
    before = [one for one in STREAM if one.arrival_ns <= load.start_ns]
    trace = simulate([*before, wanted(2, at_s)], "tilework", num_devices=2, costs=COSTS)
    last = max(trace.endings, key=lambda one: one.request.arrival_ns)
    (own,) = [one for one in trace.loads if one.load.components == ("gentd26-02",)]
    begun_ns = min(run.start_ns for run in trace.runs if run.work.job_ids == (last.job_id,))
    assert (own.start_ns, own.load.device_id) == (ns_from_s(at_s), load.load.device_id)
    assert begun_ns == own.end_ns


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_loads_do_not_undo_each_other(num_devices: int) -> None:
    """Five checkpoints that are asked for alike do not fit onto one or two devices: what is there stays."""
    requests = [wanted(1 + index % 5, 20.0 * index) for index in range(40)]
    trace = simulate(requests, "tilework", num_devices=num_devices, costs=COSTS)
    after = [load for load in ahead(trace) if load.start_ns > max(one.arrival_ns for one in requests)]
    assert len(after) <= 2 * num_devices


def test_only_what_the_host_has_is_loaded_ahead() -> None:
    requests = [wanted(1 + index % 3, 30.0 * index) for index in range(20)]
    assert not ahead(simulate(requests, "tilework", num_devices=4, costs=FORGETFUL))
    assert ahead(simulate(requests, "tilework", num_devices=4, costs=COSTS))


def test_a_device_that_loads_ahead_is_idle() -> None:
    devices: list[Any] = [SimpleNamespace(device_id=0, works=works, is_loading=True, free_ns=5) for works in ([], [0])]
    assert [is_idle(device) for device in devices] == [True, False]


def test_it_is_not_computed_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device computes for a minute, with several decisions per second; the other is idle."""
    real, tried = residency._loads, list[int]()

    def options(*arguments: object) -> Sequence[object]:
        tried.append(0)
        return list(real(*arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(residency, "_loads", options)
    long = replace(wanted(1, 0.0), shape=Shape(512, 512, 8))
    trace = simulate([long], "tilework", num_devices=2, costs=COSTS)
    assert len(trace.runs) >= 30
    assert 0 < len(tried) < 10


def test_a_device_that_dropped_weights_for_a_large_decode_has_them_again_when_it_is_idle() -> None:
    """Nothing is dropped for them. Copies on the other devices would be of no use to requests that find these busy."""
    table = shipped("flux1_l20")
    sides = [4096, 512, 512, 4096, 512, 512, 4096]
    asked = [
        Request(uid=f"{index}", pipeline="flux.1", shape=Shape(side, side), steps=4, arrival_ns=ns_from_s(40.0 * index))
        for index, side in enumerate(sides)
    ]
    trace = simulate(asked, "tilework", num_devices=8, costs=table)
    assert {load.load.stage.name for load in ahead(trace)} <= {"encode", "diffuse"}
    assert ahead(trace), "it was loaded before a request needed it"
    assert all(load.load.is_ahead for load in trace.loads), "so no request had to wait for it"
