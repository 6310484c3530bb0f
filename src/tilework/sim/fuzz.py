"""Runs scenarios and checks the invariants; makes a scenario that fails as small as possible."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.core.time import NS_PER_S
from tilework.cost.table_costs import TableCosts
from tilework.policy.registry import may_fail
from tilework.sim.faults import Faults
from tilework.sim.invariants import Invariants
from tilework.sim.scenarios.faultless import faultless_scenario
from tilework.sim.scenarios.scenario import Scenario, scenario
from tilework.sim.simulation import Observe, Simulation

# Far more than any scenario needs; one that needs more makes no progress. 400 requests on one device may each lose it
# five times to a load that its work overtook, until the device is killed after 20 s: 11 hours after the last arrival.
MAX_EVENTS = 100_000
MAX_DRAIN_NS = 24 * 3600 * NS_PER_S
_MAX_TRIALS = 150
_PER_TASK = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The result of a scenario. `violation` and `where` are empty if all invariants held.

    `fault_counts` is how often each fault happened; `endings` counts requests by how they ended. `num_promised` were
    accepted as promises and not cancelled, `num_kept` of them done in time; none of a policy that may fail requests.
    """

    seed: int
    num_events: int
    violation: str = ""
    where: str = ""
    fault_counts: Mapping[str, int] = field(default_factory=dict)
    endings: Mapping[str, int] = field(default_factory=dict)
    num_promised: int = 0
    num_kept: int = 0


def run_scenario(one: Scenario, observe: Observe | None = None) -> ScenarioResult:
    """Run a scenario and check the invariants. An exception of the controller or the simulation is a violation, too."""
    simulation = Simulation(one.controller, one.table, one.config)
    invariants = Invariants(simulation, one.controller, one.faults, TableCosts(one.table))
    num_events = 0

    def check(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        nonlocal num_events
        num_events += 1
        if observe is not None:
            observe(event, actions, now_ns)
        invariants.check(event, actions, now_ns)
        assert num_events < MAX_EVENTS, f"the scenario has not ended after {num_events} events"

    try:
        last_ns = max((request.arrival_ns for request in one.requests), default=0)
        trace = simulation.run(one.requests, one.cancels, check, last_ns + MAX_DRAIN_NS, one.changes)
        invariants.finish(trace)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('/tilework/')[2]}:{place.lineno}"
        violation = f"{type(error).__name__}: {error}"
        return ScenarioResult(
            seed=one.seed, num_events=num_events, violation=violation, where=where, fault_counts=simulation.fault_counts
        )
    endings = Counter(ending.status.value for ending in trace.endings)
    promised = [] if may_fail(one.controller.policy) else [ending for ending in trace.endings if ending.was_promised]
    return ScenarioResult(
        seed=one.seed,
        num_events=num_events,
        fault_counts=simulation.fault_counts,
        endings=endings,
        num_promised=len(promised),
        num_kept=sum(ending.on_time for ending in promised),
    )


def shrink(one: Scenario, report: Callable[[Scenario], None] | None = None) -> Scenario:
    """Return the smallest scenario found with the same failure: with fewer faults, requests and changes of what is
    served.
    """
    trials = 0
    wanted = _signature(run_scenario(one))

    def fails(smaller: Scenario) -> bool:
        nonlocal trials
        trials += 1
        return trials <= _MAX_TRIALS and _signature(run_scenario(smaller)) == wanted

    for candidates in (_without_faults, _with_fewer_requests, _with_fewer_changes, _without_faults):
        found: Scenario | None = one
        while found is not None:
            one = found
            if report is not None:
                report(one)
            found = next((smaller for smaller in candidates(one) if fails(smaller)), None)
    return one


def _signature(result: ScenarioResult) -> str:
    """Return the place and the text of a failure without digits. Failures with the same signature count as the same."""
    return result.where + "".join(letter for letter in result.violation if not letter.isdigit())


def _without_faults(one: Scenario) -> Iterator[Scenario]:
    for name in one.faults.by_name:
        yield one.with_faults(one.faults.without(name))


def _with_fewer_requests(one: Scenario) -> Iterator[Scenario]:
    yield from map(one.keeping, _with_fewer([request.uid for request in one.requests]))


def _with_fewer_changes(one: Scenario) -> Iterator[Scenario]:
    yield from map(one.keeping_changes, _with_fewer([change.number for change in one.changes]))


def _with_fewer(items: Sequence[T]) -> Iterator[set[T]]:
    """Yield what is left without one half, quarter and so on, down to single items; never without all."""
    size = len(items) // 2
    while size:
        for start in range(0, len(items), size):
            yield {*items[:start], *items[start + size :]}
        size //= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Values fixed for every seed; where one is None, the seed chooses."""

    policy: str | None = None
    faults: Faults | None = None
    changes: bool | None = None
    is_faultless: bool = False

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        if self.is_faultless:
            assert not self.faults
            return faultless_scenario(seed, self.policy, self.changes)
        return scenario(seed, self.policy, self.faults, self.changes)


def run_seed(
    seed: int, policy: str | None = None, faults: Faults | None = None, changes: bool | None = None
) -> ScenarioResult:
    return run_scenario(scenario(seed, policy, faults, changes))


def _run_seeds(seeds: Sequence[int], choice: Choice) -> list[ScenarioResult]:
    return [run_scenario(choice.scenario(seed)) for seed in seeds]


def run_seeds(seeds: Iterable[int], choice: Choice, num_processes: int) -> Iterator[ScenarioResult]:
    """Yield the results of many seeds in the order of the seeds. Seeds are taken as processes become free."""
    remaining = iter(seeds)
    parts = iter(lambda: tuple(islice(remaining, _PER_TASK)), ())
    if num_processes == 1:
        for part in parts:
            yield from _run_seeds(part, choice)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        waiting = [pool.submit(_run_seeds, part, choice) for part in islice(parts, 2 * num_processes)]
        try:
            while waiting:
                results = waiting.pop(0).result()
                waiting += [pool.submit(_run_seeds, part, choice) for part in islice(parts, 1)]
                yield from results
        finally:
            pool.shutdown(cancel_futures=True)
