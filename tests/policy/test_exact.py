"""Exact requests run on one device and alone in their forward passes, under every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import POLICIES, batched, request, simulate, table
from tilework.core.request import Request, Status
from tilework.core.work import Work
from tilework.cost.demand import fitting_degrees, step_degrees, step_speeds, usable_degree
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework_lab.optimum.bound import due_requests

WIDE = table(degrees=(1, 2, 4))
ONE_DEVICE = {
    "edf",
    "fixed-sp1",
    "fifo-load",
    "sticky",
    "lru",
    "deadline-belady",
    "deadline-lru",
    "patchedserve",
    "mixed-cache",
    "nirvana",
    "spci",
    "trident-b1",
}
"""Policies that give each request one device, here at least."""

SHARING = {"tilework", "tetriserve", "tetriserve-early", "patchedserve", "mixed-cache", "nirvana"}
"""Policies that let requests share forward passes."""


def works(policy: str, costs: CostTable, requests: list[Request], num_devices: int) -> list[Work]:
    trace = simulate(requests, policy, num_devices=num_devices, costs=costs)
    assert all(ending.status is Status.DONE for ending in trace.endings)
    return [run.work for run in trace.runs]


def of(found: list[Work], places: set[int]) -> list[Work]:
    return [work for work in found if places & set(work.job_ids)]


def is_wide(found: list[Work]) -> bool:
    return any(len(work.devices) > 1 for work in found)


def is_shared(found: list[Work]) -> bool:
    return any(len(work.job_ids) > 1 for work in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exact_request_has_one_device_where_others_have_several(policy: str) -> None:
    """A request that is urgent alone on four devices, then a few at once; every second one is exact."""
    asked = [request("0", slo_s=1.2, steps=20), *(request(str(1 + n), 9 + n // 6, slo_s=4.0) for n in range(12))]
    exact = [replace(one, exact=index % 2 == 0) for index, one in enumerate(asked)]
    assert is_wide(works(policy, WIDE, asked, 4)) is (policy not in ONE_DEVICE)
    found = works(policy, WIDE, exact, 4)
    assert not is_wide(of(found, set(range(0, 13, 2))))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exact_request_shares_no_forward_pass_where_others_share(policy: str) -> None:
    asked = [request(str(index), 0.01 * index, side=64 if index % 3 else 128, slo_s=4.0) for index in range(16)]
    exact = [replace(one, exact=index % 4 == 0) for index, one in enumerate(asked)]
    assert is_shared(works(policy, batched(), asked, 1)) is (policy in SHARING)
    found = works(policy, batched(), exact, 1)
    assert not is_shared(of(found, set(range(0, 16, 4))))
    assert is_shared(found) is (policy in SHARING), "the others share as before"


def test_one_function_knows_the_degrees_of_an_exact_request() -> None:
    costs, one = TableCosts(WIDE), request("a", exact=True, slo_s=9)
    assert step_degrees(replace(one, exact=False), costs) == (1, 2, 4)
    assert tuple(fitting_degrees(one, costs)) == step_degrees(one, costs) == (1,)
    assert usable_degree(one, 4, costs) == 1
    assert [speed.degree for speed in step_speeds(one, costs)] == [1]


def test_the_bound_gives_an_exact_request_one_device() -> None:
    """Two requests that differ in nothing else are not taken for each other."""
    both = [request("a", slo_s=9), request("b", slo_s=9, exact=True)]
    wide, narrow = due_requests(both, TableCosts(WIDE), 4)
    assert [[speed.degree for speed in due.pieces[1].speeds] for due in (wide, narrow)] == [[1, 2, 4], [1]]
    assert wide.pieces[2].speeds == narrow.pieces[2].speeds
