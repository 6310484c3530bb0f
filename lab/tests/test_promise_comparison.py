"""What promises cost: who asks, the counts of two runs by hand, what is kept, and the grid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from compared import ended, trace

from builders import promise, request
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import ns_from_s
from tilework.cost.table import BadCostTable
from tilework.cost.table_file import read_table
from tilework.sim.trace import TraceEnding
from tilework.sim.workloads.cells import Cell
from tilework.sim.workloads.family import costs_of
from tilework.sim.workloads.requests import asking, device_seconds
from tilework_lab.compare.figures import EtaFigures, PromiseFigures, promise_figures_of
from tilework_lab.compare.grid import promises_grid
from tilework_lab.compare.promises import (
    PromiseCell,
    PromiseCounts,
    counts_of,
    promise_cells,
    promise_overall,
    total,
)
from tilework_lab.compare.records import Record, Records
from tilework_lab.compare.runs import Conditions, Task, config_of, given, run
from tilework_lab.workloads.promises import Promises

NO_CONDITIONS = Conditions()
FLUX = "flux1dev_h100_eager"


def due(number: int) -> list[Request]:
    return [request(str(index), float(index), slo_s=5.0) for index in range(number)]


def asks(requests: list[Request]) -> set[str]:
    return {one.uid for one in requests if one.is_promise}


def test_a_share_of_the_requests_with_a_deadline_asks_and_the_others_are_best_effort() -> None:
    requests = [*due(400), request("free"), replace(promise("own", 1.0, slo_s=3.0)), replace(due(1)[0], uid="dropped")]
    requests[-1] = replace(requests[-1], on_miss=OnMiss.DROP)
    some = asking(requests, 0.5, seed=0)
    assert 170 < len(asks(some)) < 232
    assert {one.on_miss for one in some} == {OnMiss.REJECT, OnMiss.BEST_EFFORT}
    assert not asks(asking(requests, 0.0, seed=0))
    assert asks(asking(requests, 1.0, seed=0)) == {one.uid for one in requests if one.deadline_ns is not None}
    assert asks(asking(requests, 0.3, seed=0)) < asks(some), "those of a smaller share ask at a larger one"
    assert asks(asking(requests, 0.5, seed=1)) != asks(some)


def test_figures_of_a_run_by_hand() -> None:
    """Kept, refused, broken, best effort on time and late, and one without a deadline."""

    def told(asked: Request, finish_s: float, eta_s: float) -> TraceEnding:
        return replace(ended(asked, finish_s), eta_ns=ns_from_s(eta_s))

    refused = replace(ended(promise("b", 0.0, slo_s=1.0), 0.0, Status.REJECTED), job_id=None)
    endings = (
        told(promise("a", 0.0, slo_s=4.0), 2.0, 2.3),  # Within 20%.
        refused,
        told(promise("c", 0.0, slo_s=4.0), 6.0, 4.0),
        told(request("d", 0.0, slo_s=4.0), 3.0, 5.0),  # Said to be late, and on time.
        told(request("e", 0.0, slo_s=4.0), 8.0, 7.0),  # Said to be late, and was; within 20%.
        told(request("f", 0.0), 1.0, 9.0),
    )
    found = promise_figures_of(trace(*endings))
    eta = EtaFigures(num_done=5, num_near=2, num_said_late=2, num_late=2, num_rightly=1)
    assert found == PromiseFigures(num_requests=6, num_due=5, asked=(0, 1, 2), accepted=(0, 2), on_time=(0, 3), eta=eta)


def figures(on_time: tuple[int, ...], asked: tuple[int, ...] = (), accepted: tuple[int, ...] = ()) -> PromiseFigures:
    eta = EtaFigures(num_done=3, num_near=1)
    return PromiseFigures(num_requests=9, num_due=8, asked=asked, accepted=accepted, on_time=on_time, eta=eta)


BEFORE = figures((0, 1, 2, 3, 4, 5))
AFTER = figures((0, 1, 4, 7), asked=(0, 1, 2, 6), accepted=(0, 1, 6))
"""0 and 1 are kept, 2 is refused though best effort has it on time, 6 is broken; of the others 4 and 7 are on time."""


def test_two_runs_give_counts_by_hand() -> None:
    counts = counts_of(BEFORE, AFTER)
    assert (counts.num_due, counts.before, counts.after, counts.ratio) == (8, 6, 4, 4 / 6)
    assert (counts.asked, counts.accepted, counts.refused, counts.kept, counts.broken) == (4, 3, 1, 2, 1)
    assert (counts.fitting, counts.fitting_accepted) == (3, 2)
    assert (counts.others, counts.others_before, counts.others_after) == (4, 3, 2)
    twice = total([counts, counts])
    assert (twice.num_due, twice.kept, twice.eta_after) == (16, 4, EtaFigures(num_done=6, num_near=2))
    assert twice.ratio == counts.ratio
    assert PromiseCounts().ratio is None


def cell(name: str) -> Cell:
    return Cell(name=name, workload=Promises(), table=FLUX, num_devices=8)


def record(result: PromiseFigures) -> Record:
    return Record(config={}, result=result)


def test_cells_have_each_seed_and_name_what_failed() -> None:
    def found(where: Cell, seed: int, policy: str, share: float) -> Record | None:
        if policy == "bad":
            return None
        return record(BEFORE if not share else AFTER if seed else figures((0, 1, 2, 3, 4), asked=(0,), accepted=(0,)))

    one, two = cell("one"), cell("two")
    errors: dict[tuple[str, str | None], str] = {("one", "bad"): "broke", ("two", "bad"): "broke"}
    cells = promise_cells({one: range(2), two: range(1)}, ["good", "bad"], 0.5, found, errors)
    assert [(each.cell, each.num_seeds, dict(each.errors)) for each in cells] == [
        (one, 2, {"bad": "broke"}),
        (two, 1, {"bad": "broke"}),
    ]
    assert [counts.after for counts in cells[0].policies["good"]] == [5, 4]
    (line,) = promise_overall(cells)
    assert (line.policy, line.counts.before, line.counts.after) == ("good", 18, 14)
    assert (line.worst, line.worst_in) == (4 / 6, "one, seed 1"), "the lowest ratio of a cell and a seed"
    assert not promise_cells({one: range(1)}, ["bad"], 0.5, found, errors)


def test_a_cell_without_deadlines_has_no_ratio() -> None:
    (line,) = promise_overall(
        [PromiseCell(cell=cell("a"), num_requests=1, policies={"p": [PromiseCounts()]}, errors={})]
    )
    assert (line.worst, line.worst_in) == (None, "")


# Runs.


@pytest.fixture
def small() -> Cell:
    workload = Promises(num_requests=20, steps=4, last=2.0, rate_per_s=4.0)
    return Cell(name="small", workload=workload, table=workload.cost_table, num_devices=8)


def test_a_run_counts_the_requests_that_ask(small: Cell) -> None:
    def figures_at(share: float) -> PromiseFigures:
        result = run(Task(cell=small, seed=3, policy="edf", promises=share), NO_CONDITIONS).result
        assert isinstance(result, PromiseFigures)
        return result

    none, some, all_ = map(figures_at, (0.0, 0.5, 1.0))
    num_due = sum(one.slo_s is not None for one in given(small, 3)[0])
    assert none.num_due == some.num_due == all_.num_due == num_due
    assert not none.asked
    assert set(some.asked) < set(all_.asked)
    assert len(all_.asked) == num_due
    assert set(all_.on_time) == set(all_.accepted), "what is promised is kept, and what is refused is not served"


def test_the_share_is_part_of_the_key_and_a_result_is_read_back(small: Cell, tmp_path: Path) -> None:
    tasks = [Task(cell=small, seed=0, policy="edf", promises=share) for share in (None, 0.0, 0.5, 1.0)]
    assert len({json.dumps(config_of(task, NO_CONDITIONS)) for task in tasks}) == 4
    assert "promises" not in config_of(tasks[0], NO_CONDITIONS), "results that were kept before are found"
    made = run(tasks[2], NO_CONDITIONS)
    Records(tmp_path / "results.jsonl").add(made)
    assert Records(tmp_path / "results.jsonl").get(made.key) == made


# The grid and its tables.


def test_the_grid_has_loads_of_the_cheapest_degree() -> None:
    cells = promises_grid()
    assert len({one.name for one in cells}) == 8
    assert {one.table for one in cells} == {f"{FLUX},speed=1.5", f"{FLUX},speed=1.5,last=2"}
    for one in cells:
        requests, _ = given(one, 0)
        rate = one.parameters["rate_per_s"]
        load = sum(device_seconds(requests, costs_of(one.table))) / len(requests) * rate / one.num_devices
        assert load == pytest.approx(float(one.name.rpartition("l")[2]), rel=0.001)


def test_a_table_may_be_quicker_and_have_a_last_stage() -> None:
    plain, quick, decoding = (read_table(FLUX + options) for options in ("", ",speed=2", ",speed=2,last=3"))
    assert [row.seconds for row in quick.rows] == [row.seconds / 2 for row in plain.rows]
    assert decoding.rows[: len(plain.rows)] == quick.rows
    alone = {row.shape: row.seconds for row in quick.rows if row.degree == 1}
    last = decoding.rows[len(plain.rows) :]
    assert {row.shape: row.seconds for row in last} == {shape: 3 * seconds for shape, seconds in alone.items()}
    assert {(row.stage, row.degree) for row in last} == {("decode", 1)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (",speed=0", "'speed=0' is no option of a cost table; give cell=N or cell=auto, speed=FACTOR, or last=STEPS"),
        (",last=x", "'last=x' is no option"),
        (",last=1,last=1", "the last stage of 'flux.1-dev', decode, has rows of its own; leave last=1 out"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: str, words: str) -> None:
    with pytest.raises(BadCostTable, match=words):
        read_table(FLUX + options)
