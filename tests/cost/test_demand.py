"""What remains of requests whose pipelines have several stages with steps, and what is started of it."""

from __future__ import annotations

from itertools import product

import pytest

from builders import job, request
from policy.drafted import COSTS, GRAPH
from tilework.core.block import Demand
from tilework.core.time import NS_PER_MS
from tilework.cost.demand import (
    Speed,
    demand_at,
    demands_at,
    fits_at,
    head_and_tail_ns,
    step_degrees,
    step_speeds,
)
from tilework.policy.toolkit.known_demands import Choices
from tilework.policy.toolkit.tasks import Task, TaskReader

MS = NS_PER_MS
ASKED = request("a", steps=10)
WAY = GRAPH.itinerary(10)
# Positions: 1 read, 2-9 drafted, 10 enlarged, 11-12 painted, 13 shown.


def test_all_stages_with_steps_run_at_degrees_at_which_all_were_profiled() -> None:
    assert step_degrees(ASKED, COSTS) == (1, 2)
    assert step_degrees(request("b", exact=True), COSTS) == (1,)
    assert all(fits_at(ASKED, degree, COSTS) for degree in (1, 2))


@pytest.mark.parametrize(
    ("position", "expected_ms"),
    [(0, {1: 120, 2: 72}), (1, {1: 120, 2: 72}), (7, {1: 150, 2: 90}), (9, {1: 200, 2: 120}), (11, {1: 200, 2: 120})],
)
def test_a_step_takes_the_mean_of_those_that_are_left(position: int, expected_ms: dict[int, int]) -> None:
    speeds = step_speeds(ASKED, COSTS, left=WAY.at[position])
    assert speeds == tuple(Speed(degree, ms * MS) for degree, ms in expected_ms.items())


def test_without_steps_there_is_no_speed() -> None:
    assert step_speeds(ASKED, COSTS, left=WAY.at[12]) == ()
    assert step_speeds(ASKED, COSTS, max_degree=1) == (Speed(1, 120 * MS),)


@pytest.mark.parametrize(
    ("position", "head_ms", "tail_ms"),
    [(0, 10, 80), (1, 0, 80), (8, 0, 80), (9, 30, 50), (10, 0, 50), (12, 0, 50), (13, 0, 0)],
)
def test_other_stages_come_before_the_next_steps_or_after(position: int, head_ms: int, tail_ms: int) -> None:
    """Those between two stages with steps are before the second once the first is done."""
    assert head_and_tail_ns(ASKED, WAY.at[position], COSTS) == (head_ms * MS, tail_ms * MS)


@pytest.mark.parametrize(("position", "degree"), product(range(14), (1, 2)))
def test_the_parts_add_up_to_the_demand(position: int, degree: int) -> None:
    left = WAY.at[position]
    head_ns, tail_ns = head_and_tail_ns(ASKED, left, COSTS)
    steps_ns = sum(left.num_steps_left * one.step_ns for one in step_speeds(ASKED, COSTS, left=left)[degree - 1 :][:1])
    demand = demand_at(ASKED, left, degree, COSTS)
    assert demand.width == degree
    assert demand.run_ns == pytest.approx(head_ns + steps_ns + tail_ns, abs=left.num_steps_left)
    last_ns = head_and_tail_ns(ASKED, WAY.at[12], COSTS)[1]
    is_wide = degree > 1 and left.num_steps_left > 0
    assert (demand.before_ns, demand.after_ns) == ((head_ns, last_ns) if is_wide else (0, demand.after_ns))


def test_the_cheapest_degree_in_time_counts_all_stages_with_steps() -> None:
    start = WAY.at[0]
    alone, both = Demand(1, 1290 * MS), Demand(2, 810 * MS, 10 * MS, 50 * MS)
    assert both.device_ns == (2 * 810 - 60) * MS
    choices = Choices.of((1, 2), demands_at(ASKED, start, (1, 2), COSTS))
    assert choices.cheapest_in_time(1290 * MS) == alone
    assert choices.cheapest_in_time(1289 * MS) == both
    assert choices.cheapest_in_time(0) == both, "none is in time, and it ends first"


def task(position: int) -> Task:
    read = TaskReader({}, COSTS, 2, 0).read(job(0, ASKED, done=WAY.at[position]))
    assert read is not None
    return read


@pytest.mark.parametrize(
    ("position", "num_steps", "expected"),
    [
        (0, 3, [("read", (0,), 1), ("draft", (0, 1), 3)]),
        (0, 8, [("read", (0,), 1), ("draft", (0, 1), 8), ("enlarge", (0,), 1)]),
        (0, 10, [("read", (0,), 1), ("draft", (0, 1), 8), ("enlarge", (0,), 1)]),
        (9, 1, [("enlarge", (0,), 1), ("paint", (0, 1), 1)]),
        (10, 2, [("paint", (0, 1), 2), ("show", (0,), 1)]),
        (12, 0, [("show", (0,), 1)]),
    ],
)
def test_a_task_starts_steps_of_the_next_stage_alone(
    position: int, num_steps: int, expected: list[tuple[str, tuple[int, ...], int]]
) -> None:
    starts = task(position).starts((0, 1), num_steps, "")
    assert [(start.stage.name, start.devices, start.num_steps) for start in starts] == expected


def test_a_task_ends_when_all_its_stages_have_run() -> None:
    one = task(0)
    assert (one.head_ns, one.num_steps, one.tail_ns) == (10 * MS, 10, 80 * MS)
    assert [one.finish_ns(speed) for speed in one.speeds] == [1290 * MS, 810 * MS]
    assert TaskReader({}, COSTS, 2, 0).read(job(0, ASKED, done=WAY.at[13])) is None
