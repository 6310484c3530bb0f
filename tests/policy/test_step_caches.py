"""Requests with a cache of whole steps make these on one device and alone, under every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import POLICIES, batched, request, simulate, table
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.request import Request, Status
from tilework.core.work import Work
from tilework.cost.degrees import alone_ns
from tilework.cost.demand import step_degrees
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts

WIDE = table(degrees=(1, 2, 4))
CHOICES = (CacheChoice(CacheKind.FBCACHE, 0.05), CacheChoice(CacheKind.TAYLORSEER, 3))


def steps(policy: str, costs: CostTable, requests: list[Request], num_devices: int) -> list[Work]:
    trace = simulate(requests, policy, num_devices=num_devices, costs=costs)
    assert all(ending.status is Status.DONE for ending in trace.endings)
    return [run.work for run in trace.runs if run.work.stage.has_steps]


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_with_a_cache_of_whole_steps_have_one_device(policy: str) -> None:
    """Of requests that are urgent alone on four devices, and of a few at once."""
    asked = [request("0", slo_s=1.2, steps=20), *(request(str(1 + n), 9 + n // 6, slo_s=4.0) for n in range(12))]
    cached = [replace(one, cache=CHOICES[place % 2]) for place, one in enumerate(asked)]
    found = steps(policy, WIDE, cached, 4)
    assert {len(work.devices) for work in found} == {1}


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_with_a_cache_of_whole_steps_share_no_forward_pass(policy: str) -> None:
    asked = [request(str(place), 0.01 * place, side=64 if place % 3 else 128, slo_s=4.0) for place in range(16)]
    found = steps(policy, batched(), [replace(one, cache=CHOICES[0]) for one in asked], 1)
    assert {len(work.job_ids) for work in found} == {1}


@pytest.mark.parametrize("choice", CHOICES)
def test_degrees_and_the_time_alone_are_those_of_one_device(choice: CacheChoice) -> None:
    costs, one = TableCosts(WIDE), request("a", slo_s=9)
    cached = replace(one, cache=choice)
    assert (step_degrees(one, costs), step_degrees(cached, costs)) == ((1, 2, 4), (1,))
    assert alone_ns(costs, cached, 4) == alone_ns(costs, one, 1) > alone_ns(costs, one, 4)
    patch = replace(one, cache=CacheChoice(CacheKind.PATCH, 0.01))
    assert step_degrees(patch, costs) == (1, 2, 4), "it is left out where several devices share a step"
