"""Simulated requests with a cache: what is drawn for each, and what that does to their times; workloads with caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from builders import PIPELINE, request, simulate, table
from stages import DIFFUSE
from tilework.client.dialect import Dialect
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.formats.json_lines import BadLine
from tilework.formats.workload import WorkloadRequest, read_workload, write_workload
from tilework.sim.trace import Trace
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests

CHOICE = CacheChoice(CacheKind.PATCH, 0.003)


def costs(time: float, skipped: float, std: float) -> CostTable:
    known = table(encode_s=0.001, decode_s=0.001)
    rows = [
        replace(one, seconds=time * one.seconds, cache=CHOICE, skipped=skipped, skipped_std=std)
        for one in known.rows
        if one.stage == DIFFUSE
    ]
    return replace(known, rows=(*known.rows, *rows))


def steps_s(trace: Trace) -> list[float]:
    """Seconds of the steps of each request."""
    found = dict.fromkeys([ending.job_id for ending in trace.endings], 0.0)
    for run in trace.runs:
        if run.work.stage.has_steps:
            found[run.work.job_ids[0]] += (run.end_ns - run.start_ns) / NS_PER_S
    return list(found.values())


def spread_out(number: int, **more: Any) -> list[Any]:
    return [request(str(index), 2.0 * index, cache=CHOICE, **more) for index in range(number)]


def test_without_a_deviation_each_request_takes_the_mean() -> None:
    assert steps_s(simulate(spread_out(3), costs=costs(0.6, 0.5, 0.0))) == pytest.approx([0.6] * 3)


def test_what_is_skipped_is_drawn_for_each_request_and_saves_in_proportion() -> None:
    found = steps_s(simulate(spread_out(200), costs=costs(0.6, 0.5, 0.1)))
    assert fmean(found) == pytest.approx(0.6, abs=0.02)
    assert pstdev(found) == pytest.approx(0.4 / 0.5 * 0.1, rel=0.2)


def test_a_request_skips_the_same_under_each_policy_and_another_with_another_seed() -> None:
    asked, known = spread_out(5), costs(0.6, 0.5, 0.1)
    edf, fixed = (steps_s(simulate(asked, policy, costs=known)) for policy in ("edf", "fixed-sp1"))
    assert edf == pytest.approx(fixed)
    assert len(set(edf)) == 5
    assert steps_s(simulate(asked, costs=known, seed=1)) != pytest.approx(edf)


def test_nothing_skips_less_than_nothing() -> None:
    assert max(steps_s(simulate(spread_out(60), costs=costs(0.6, 0.1, 0.5)))) == pytest.approx(1.0)


# Workloads.


def line(number: int, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(id=number, arrival_s=0.0, pipeline=PIPELINE, height=64, width=64, steps=4, **more)


def test_a_workload_may_name_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = line(0), line(1, cache="patch", cache_threshold=0.01), line(2, cache="if_late")
    write_workload(path, lines)
    assert read_workload(path) == lines
    plain, cached, late = to_requests(lines)
    assert (plain.cache, plain.spare_cache) == (None, None)
    assert (cached.cache, cached.spare_cache) == (CacheChoice(CacheKind.PATCH, 0.01), None)
    assert (late.cache, late.spare_cache) == (None, CHOICE)
    bodies = [Dialect().body_of(one) for one in lines]
    assert [(one.get("cache"), one.get("cache_threshold")) for one in bodies] == [
        (None, None),
        ("patch", 0.01),
        ("if_late", 0.003),
    ]
    assert "cache" not in Dialect(plain=True).body_of(lines[1])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ('"cache": "page"', "use one of off, patch, image, if_late"),
        ('"cache": "patch", "cache_threshold": 2', "give a number from 0 to 1"),
        ('"cache_threshold": 0.1', "it has no effect without a cache; give cache, too"),
        ('"cache": "patch", "exact": true', "a request with a cache is not exact"),
    ],
)
def test_a_wrong_cache_is_named(tmp_path: Path, fields: str, complaint: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"arrival_s": 0, "pipeline": "p", "height": 64, "width": 64, "steps": 1, {fields}}}\n')
    with pytest.raises(BadLine, match=complaint):
        read_workload(path)


def test_a_made_workload_has_its_cache_and_is_else_the_same() -> None:
    plain = make_workload("patchedserve-sd3", {"num_requests": 5}).requests(1)
    cached = make_workload("patchedserve-sd3", {"num_requests": 5, "cache": "patch", "cache_threshold": 0.01}).requests(
        1
    )
    assert [replace(one, cache="off", cache_threshold=0.003) for one in cached] == list(plain)
    assert {(one.cache, one.cache_threshold) for one in cached} == {("patch", 0.01)}
