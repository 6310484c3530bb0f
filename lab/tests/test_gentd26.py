"""The workload fitted to GenTD26: what it generates against the fit, its cost table, and loads in simulation."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from builders import shipped, simulate
from tilework.core.component import LoadSource
from tilework.core.request import Request, Shape, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.degrees import optimal_latency_ns
from tilework.cost.table_costs import TableCosts
from tilework.formats.workload import WorkloadRequest
from tilework.sim.trace import Trace
from tilework.sim.workloads.family import BadParameter
from tilework.sim.workloads.registry import make_workload
from tilework_lab.workloads.gentd26.fit import read_fit
from tilework_lab.workloads.gentd26.table import make_table

DAY = {"from_hour": 0, "to_hour": 24}
SEEDS = range(6)


@cache
def day(seed: int) -> tuple[WorkloadRequest, ...]:
    """A whole day at the rates of the fit."""
    fit = read_fit()
    load = sum(fit.sessions_per_hour) / 24 * fit.mean_length * fit.mean_infer_s / 3600 / 4
    return make_workload("gentd26", DAY | {"load": load}).requests(seed)


def asked(seed: int, **values: Any) -> tuple[WorkloadRequest, ...]:
    return make_workload("gentd26", values).requests(seed)


def lru_hits(pipelines: Sequence[str], size: int) -> float:
    """How often a list of the pipelines that were used last has the next one."""
    kept: OrderedDict[str, None] = OrderedDict()
    num_hits = 0
    for pipeline in pipelines:
        num_hits += pipeline in kept
        kept[pipeline] = None
        kept.move_to_end(pipeline)
        if len(kept) > size:
            kept.popitem(last=False)
    return num_hits / len(pipelines)


def test_days_have_the_mix_of_checkpoints_of_the_fit() -> None:
    """The figures are those of the generator that the fit was checked with, against six held-out days."""
    days = [[request.pipeline for request in day(seed)] for seed in SEEDS]
    counts = [Counter(pipelines) for pipelines in days]
    assert fmean(map(len, days)) == pytest.approx(1760, rel=0.1)
    assert fmean(map(len, counts)) == pytest.approx(40.2, rel=0.1)
    top = [[number for _, number in count.most_common(10)] for count in counts]
    shares = [(numbers[0] / len(one), sum(numbers) / len(one)) for numbers, one in zip(top, days, strict=True)]
    assert fmean(first for first, _ in shares) == pytest.approx(0.295, abs=0.04)
    assert fmean(ten for _, ten in shares) == pytest.approx(0.878, abs=0.02)
    switches = [fmean(a != b for a, b in pairwise(pipelines)) for pipelines in days]
    assert fmean(switches) == pytest.approx(0.767, abs=0.03)
    for size, hits in ((1, 0.235), (2, 0.423), (4, 0.665), (8, 0.852), (16, 0.951)):
        assert fmean(lru_hits(pipelines, size) for pipelines in days) == pytest.approx(hits, abs=0.03)


def test_days_have_the_hours_and_pictures_of_the_fit() -> None:
    requests = [request for seed in SEEDS for request in day(seed)]
    assert fmean(request.frames for request in requests) == pytest.approx(2.45, rel=0.08)
    assert {request.frames for request in requests} == {1, 2, 4, 8}
    assert fmean(request.steps == 30 for request in requests) == pytest.approx(0.933, abs=0.04)
    hours = Counter(int(request.arrival_s // 3600) for request in requests)
    assert hours[17] > 3 * hours[20] > 0
    large = {request.pipeline for request in requests if request.height * request.width >= 1024 * 1024}
    assert large == {"gentd26-04", "gentd26-08", "gentd26-19"}


def test_the_load_scales_the_rate_of_sessions() -> None:
    few, many = (fmean(len(asked(seed, load=load)) for seed in SEEDS) for load in (0.2, 0.8))
    assert many / few == pytest.approx(4, rel=0.15)
    assert len(asked(0, devices=8)) > 1.6 * len(asked(0))


def test_deadlines_are_multiples_of_the_inference_alone() -> None:
    costs = TableCosts(shipped("gentd26"))
    requests = asked(0, slo=5.0, to_hour=15)
    for request in requests:
        alone_s = optimal_latency_ns(costs, request.pipeline, request.shape, request.steps) / NS_PER_S
        assert request.slo_s == pytest.approx(5 * alone_s, abs=1e-5)
    tight = asked(0, slo=2.5, to_hour=15)
    assert [replace(one, slo_s=None) for one in tight] == [replace(one, slo_s=None) for one in requests]


def test_hours_are_in_order() -> None:
    with pytest.raises(BadParameter, match="to_hour is 14; use an hour after 14"):
        make_workload("gentd26", {"to_hour": 14})


def test_the_shipped_table_is_the_one_that_is_made() -> None:
    assert shipped("gentd26") == make_table()


def test_inference_by_pictures_pixels_and_steps() -> None:
    """11 s for one picture of mean size in 30 steps; four take 2.8 times as long, twice the pixels 2 ^ 1.1 times."""
    costs = TableCosts(shipped("gentd26"))

    def seconds(shape: Shape, steps: int = 30) -> float:
        return optimal_latency_ns(costs, "gentd26-01", shape, steps) / NS_PER_S

    one = seconds(Shape(512, 512))
    assert one == pytest.approx(11.0 / 1.2409, rel=1e-4)
    assert seconds(Shape(512, 512, 4)) == pytest.approx(2.8 * one, rel=1e-4)
    assert seconds(Shape(768, 512)) == pytest.approx(1.5**1.1 * one, rel=1e-4)
    assert seconds(Shape(512, 512), 40) == pytest.approx(4 / 3 * one, rel=1e-4)


def of_checkpoint(rank: int, arrival_s: float = 0.0, uid: str | None = None) -> Request:
    return Request(
        uid=uid or f"{rank} at {arrival_s}",
        pipeline=f"gentd26-{rank:02}",
        shape=Shape(512, 512),
        steps=30,
        arrival_ns=ns_from_s(arrival_s),
    )


def loads(trace: Trace) -> list[tuple[str, float]]:
    """The sources and times of all loads, in order of their ends."""
    return [(one.load.source.value, (one.end_ns - one.start_ns) / NS_PER_S) for one in trace.loads]


def test_a_device_holds_two_checkpoints_and_its_host_six() -> None:
    """On one device, one after another: from storage when new; then from the host, if it is one of the last six."""
    ranks = [1, 2, 2, 1, 3, 2, *range(4, 9), 2, 3]
    requests = [of_checkpoint(rank, 100.0 * index) for index, rank in enumerate(ranks)]
    found = loads(simulate(requests, "fifo-load", num_devices=1, costs=shipped("gentd26")))
    storage, host = (LoadSource.DISK.value, pytest.approx(32.8)), (LoadSource.HOST.value, pytest.approx(3.4))
    assert found == [storage, storage, storage, host, *[storage] * 5, host, storage], "2 is the sixth, 3 is forgotten"


def test_a_request_that_is_told_to_stop_in_its_last_step_is_done() -> None:
    """Its graph ends with steps. One that is due sooner comes in the last of them, from 8.57 to 8.86 s."""
    everywhere = replace(shipped("gentd26"), components={}, load_bytes_per_s={}, memory_bytes=None, host_bytes=None)
    long, urgent = of_checkpoint(1), of_checkpoint(2, 8.7)
    requests = [replace(long, deadline_ns=100 * NS_PER_S), replace(urgent, deadline_ns=20 * NS_PER_S)]
    trace = simulate(requests, "tilework", num_devices=1, costs=everywhere)
    assert [ending.status for ending in trace.endings] == [Status.DONE] * 2
    assert [ending.on_time for ending in trace.endings] == [True] * 2
