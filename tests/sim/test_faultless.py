"""Scenarios in which nothing goes wrong and runs take the predicted time: every promise is kept."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from quick import quick_rows
from tilework.admission.reservation_guard import ReservationGuard, Review
from tilework.cli.app import app
from tilework.core.request import Status
from tilework.cost.demand import demand_at, step_degrees
from tilework.cost.table_costs import TableCosts
from tilework.sim.fuzz import Choice, run_seeds
from tilework.sim.scenarios.faultless import faultless_scenario
from tilework.sim.simulation import Simulation

_PER_CASE = 100
CASES = [(policy, first) for policy in (None, "tilework") for first in range(0, 10_000, _PER_CASE)]
"""The policies of the seeds, and the default one alone."""


@pytest.mark.parametrize(("policy", "first"), quick_rows(((None, 600), ("tilework", 0), ("tilework", 300)), CASES))
def test_every_promise_is_kept(policy: str | None, first: int) -> None:
    results = list(run_seeds(range(first, first + _PER_CASE), Choice(policy=policy, is_faultless=True), 1))
    given = f" --policy {policy}" if policy else ""
    bad = [f"tilework fuzz --faultless --seed {one.seed}{given}: {one.violation}" for one in results if one.violation]
    assert not bad, "\n".join(bad)


def test_many_promises_are_given_and_many_refused() -> None:
    """Where none is given, none can be broken."""
    counts = Counter[Status]()
    for one in map(faultless_scenario, range(12)):
        trace = Simulation(one.controller, one.table, one.config).run(one.requests, one.cancels, changes=one.changes)
        counts.update(ending.status for ending in trace.endings if ending.request.is_promise)
    assert counts[Status.DONE] > 60
    assert counts[Status.REJECTED] > 30


def test_nothing_goes_wrong_in_them_and_they_differ_in_all_else() -> None:
    found = [faultless_scenario(seed) for seed in range(150)]
    assert all(not one.faults and not one.config.jitter and one.config.dispatch_ns_at(8) <= 500_000 for one in found)
    assert not [row for one in found for row in one.table.rows if row.skipped_std]
    steps_s = [
        row.seconds
        for one in found
        for row in one.table.rows
        if row.degree == row.batch == 1 and one.table.graph(row.pipeline).stage(row.stage).has_steps
    ]
    assert min(steps_s) < 0.002
    assert max(steps_s) > 1.5
    assert {one.config.num_devices for one in found} == {1, 2, 3, 4, 5, 8}
    assert 5 < sum(len(one.requests) > 100 for one in found) < 30
    for differs in (
        [one.table.needs_slots for one in found],
        [bool(one.table.components) for one in found],
        [bool(one.table.loras) for one in found],
        [bool(one.changes) for one in found],
        [bool(one.cancels) for one in found],
        [one.config.num_devices > one.table.devices_per_node for one in found],
        [any(not stage.has_steps and stage.is_parallel for stage in one.table.graph("fuzz").stages) for one in found],
        [request.exact for one in found for request in one.requests],
        [bool(request.preview_every) for one in found for request in one.requests],
        [request.is_promise for one in found for request in one.requests],
    ):
        assert set(differs) == {False, True}


def test_deadlines_are_in_proportion_to_what_requests_take() -> None:
    factors = []
    for one in (one for one in map(faultless_scenario, range(60)) if not one.changes and not one.table.components):
        costs = TableCosts(one.table, max_batch=one.controller.max_batch)
        for request in one.requests:
            if request.deadline_ns is not None:
                start = costs.start(request)
                degrees = step_degrees(request, costs)
                best_ns = min(demand_at(request, start, degree, costs).run_ns for degree in degrees)
                factors.append((request.deadline_ns - request.arrival_ns) / best_ns)
    assert 1.19 < min(factors) < 1.3
    assert 9.5 < max(factors) < 10.1


def let_all_starts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReservationGuard, "review", lambda _self, starts, *_: Review(starts))


def test_a_promise_that_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_starts_pass(monkeypatch)
    results = run_seeds(range(6, 8), Choice(policy="srtf", is_faultless=True), 1)
    assert any("is broken without a fault: done +" in result.violation for result in results)


# The command.


def test_the_command_runs_faultless_scenarios_and_says_how_to_run_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_starts_pass(monkeypatch)
    words = ["fuzz", "--faultless", "--seeds", "2", "--first", "6", "--processes", "1", "--policy", "srtf"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    (command,) = re.findall(r"tilework (fuzz --seed \d+ --faultless --policy srtf .*)", result.stdout)
    again = CliRunner().invoke(app, command.split())
    assert again.exit_code == 1
    assert "is broken without a fault" in again.stdout
    assert "faults none" in again.stdout


def test_faultless_scenarios_take_no_faults() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--faultless", "--seeds", "1", "--fault", "crash"])
    assert result.exit_code == 1
    assert "--fault crash is for scenarios with faults; leave out --faultless" in str(result.exception)
