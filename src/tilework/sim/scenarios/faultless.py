"""Scenarios without faults, in which runs take the predicted time: every promise must be kept.

Steps take from a millisecond to seconds, as do stages without steps, and deadlines are in proportion to what requests
take. So what a running step delays is much in some scenarios, and what a command costs in others.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tilework.admission.loads import load_bound_ns
from tilework.control.controller import ControllerConfig
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import OnMiss, Request, Shape
from tilework.cost.demand import demand_at, step_degrees
from tilework.cost.table_costs import TableCosts
from tilework.policy.registry import SHIPPED
from tilework.sim.config import SimConfig
from tilework.sim.scenarios.made_up_tables import (
    PIPELINE,
    drawn_seconds,
    made_up_graph,
    made_up_table,
    some_shared,
    with_components,
    with_slots,
    with_states,
    with_wide_stages,
)
from tilework.sim.scenarios.scenario import (
    Scenario,
    drawn_cancels,
    some_dropped,
    some_exact,
    with_caches,
    with_changes,
    with_loras,
    with_pools,
)

_TIGHTNESS = (1.2, 10.0), (1.2, 10.0), (1.2, 2.5), (2.0, 5.0)
"""Ranges of deadlines, as multiples of the best latency."""
_LONG_SHARE = 0.1
_MANY = 120
_WIDE = (1, 2, 4, 8)


def faultless_scenario(seed: int, policy: str | None = None, changes: bool | None = None) -> Scenario:
    """Return the scenario of a seed; `policy`, and whether models come and go, replace the choice of the seed.

    One in ten is long, on many devices: there steps are stopped more often.
    """
    random = Random(f"faultless/{seed}")
    is_long = Random(f"long/{seed}").random() < _LONG_SHARE
    graph = with_slots(some_shared(made_up_graph(random), random), random)
    graph = with_wide_stages(graph, random)
    table = made_up_table(
        graph,
        _WIDE if is_long else random.choice(((1,), (1, 2), (1, 2, 4), _WIDE)),
        8 if is_long else random.choice((1, 2, 4, 8)),
        random.choice((0.0, 0.0, 0.15, 0.5)),
        drawn_seconds(graph, random),
    )
    table = with_components(with_states(table, random), random)
    made = Scenario(
        seed=seed,
        controller=ControllerConfig(
            policy=random.choice(list(SHIPPED)) if policy is None else policy,
            max_jobs=random.choice((10, 1000, 1000)),
            max_residents=random.choice((1, 4, 64)),
            max_batch=random.choice((1, 2, 12, 12)),
        ),
        table=table,
        config=SimConfig(
            num_devices=random.choice((4, 8) if is_long else (1, 2, 2, 3, 4, 5, 8)),
            slots_per_node=random.choice((1, 1, 2)),
            seed=seed,
            dispatch_ns=random.choice((0, 500_000)),
            state_copies=random.choice((1, 1, 2)),
        ),
        requests=some_exact(random, _requests(random, is_long=is_long)),
    )
    made = with_loras(made, random)
    if not changes:
        made = with_pools(made, random)
    made = _with_deadlines(with_caches(made, random, stds=(0.0,)), random)
    made = replace(made, requests=some_dropped(random, made.requests))
    made = replace(made, cancels=drawn_cancels(random, made.requests))
    return with_changes(made, random) if changes or (changes is None and random.random() < 0.25) else made


def _requests(random: Random, *, is_long: bool) -> tuple[Request, ...]:
    """Make requests that all arrive at once, without deadlines."""
    most_steps = random.choice((1, 4, 20, 20))
    num_requests = _MANY if is_long else random.randint(4, 40)
    return tuple(_request(random, str(index), most_steps) for index in range(num_requests))


def _request(random: Random, uid: str, most_steps: int) -> Request:
    priority = random.choice(tuple(DEFAULT_CLASSES))
    return Request(
        uid=uid,
        pipeline=PIPELINE,
        shape=Shape(*random.choice(((64, 64), (128, 128), (192, 192), (64, 192)))),
        steps=random.randint(1, most_steps),
        arrival_ns=0,
        tenant=random.choice(("a", "a", "a", "b")),
        priority=priority,
        weight=DEFAULT_CLASSES[priority],
        guided=random.random() < 0.7,
        preview_every=random.choice((0, 0, 0, 3)),
    )


def _with_deadlines(made: Scenario, random: Random) -> Scenario:
    """Return the scenario with Poisson arrivals, deadlines in proportion to what requests take, and promises."""
    costs = TableCosts(made.table, max_batch=made.controller.max_batch)
    takes = [_takes(one, costs) for one in made.requests]
    mean_ns = sum(device_ns for _, device_ns in takes) / len(takes)
    gap_ns = mean_ns / (random.uniform(0.4, 1.5) * made.config.num_devices)
    least, most = random.choice(_TIGHTNESS)
    promised = random.uniform(0.3, 1.0)
    no_deadline = random.choice((0.0, 0.1, 0.4))
    arrival_ns = 0
    requests = list[Request]()
    for request, (best_ns, _) in zip(made.requests, takes, strict=True):
        arrival_ns += round(random.expovariate(1) * gap_ns)
        deadline_ns = arrival_ns + round(random.uniform(least, most) * best_ns)
        requests.append(
            replace(
                request,
                arrival_ns=arrival_ns,
                deadline_ns=None if random.random() < no_deadline else deadline_ns,
                on_miss=OnMiss.REJECT if random.random() < promised else OnMiss.BEST_EFFORT,
            )
        )
    return replace(made, requests=tuple(requests))


def _takes(request: Request, costs: TableCosts) -> tuple[int, int]:
    """Return the times of a request alone, in ns: the shortest latency, with all loads, and the least device time."""
    start = costs.start(request)
    loads_ns = sum(load_bound_ns(stage, costs.weights) for stage, _ in start.pieces)
    demands = [demand_at(request, start, degree, costs) for degree in step_degrees(request, costs)]
    return loads_ns + min(one.run_ns for one in demands), min(one.device_ns for one in demands)
