"""Scenarios for fuzzing: a cluster, a workload and faults, all from one seed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tilework.control.controller import ControllerConfig
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.component import Component
from tilework.core.graph.graph import Graph
from tilework.core.lora import Lora, UsedLora
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.policy.registry import SHIPPED, keeps_pools, make_policy
from tilework.policy.traits import NeedsFuture
from tilework.sim.config import SimConfig
from tilework.sim.faults import FAULTS, Fault, Faults
from tilework.sim.models.catalog import TimedChange
from tilework.sim.models.drawn import drawn_changes
from tilework.sim.scenarios.made_up_tables import (
    PIPELINE,
    WEIGHTS_UNIT,
    made_up_graph,
    made_up_table,
    some_shared,
    usual_seconds,
    with_components,
    with_slots,
    with_states,
)

_OTHER = f"{PIPELINE} too"
_MEAN_S = 0.8  # Rough mean time of a request on one device.
_LATER_FAULTS = ("leave", "partition", "fetch", "clock", "frontend"), ("late",), ("links",)
"""Faults added later are drawn by themselves, so that a seed keeps its other faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, a workload, faults and changes of what is served to run the controller on.

    `cancels` are (time in ns, uid).
    """

    seed: int
    controller: ControllerConfig
    table: CostTable
    config: SimConfig
    requests: tuple[Request, ...]
    cancels: tuple[tuple[int, str], ...] = field(default=())
    changes: tuple[TimedChange, ...] = ()

    def keeping(self, uids: Collection[str]) -> Scenario:
        """Return the scenario with these requests only."""
        requests = tuple(request for request in self.requests if request.uid in uids)
        cancels = tuple(cancel for cancel in self.cancels if cancel[1] in uids)
        return replace(self, requests=requests, cancels=cancels)

    def keeping_changes(self, numbers: Collection[int]) -> Scenario:
        """Return the scenario with these changes only."""
        return replace(self, changes=tuple(one for one in self.changes if one.number in numbers))

    def with_faults(self, faults: Faults) -> Scenario:
        return replace(self, config=replace(self.config, faults=faults))

    @property
    def faults(self) -> Faults:
        return self.config.faults


def scenario(
    seed: int, policy: str | None = None, faults: Faults | None = None, changes: bool | None = None
) -> Scenario:
    """Return the scenario of a seed; `policy`, `faults`, and whether models come and go replace the choice of the seed.

    Each fault is on at random, independent of the others, so that some scenarios have few faults, whose effects
    others would hide.

    Source: Groce et al., Swarm Testing, ISSTA 2012.
    """
    random = Random(f"tilework/{seed}")
    num_devices = random.choice((1, 2, 2, 3, 4, 4, 8))
    devices_per_node = random.choice((1, 2, 4, 8))
    degrees = random.choice(((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)))
    chosen = _swarm_faults(seed)
    batch_random = Random(f"batches/{seed}")
    slot_random = Random(f"slots/{seed}")
    is_overload = random.random() < 0.04
    if is_overload:
        num_devices = 1
    rate = random.uniform(1.1, 1.6) if is_overload else random.choice((0.4, 0.8, 1.2, 3.0))
    num_requests = 400 if is_overload else random.randint(4, 90)
    requests = _requests(random, num_requests, rate * num_devices / _MEAN_S, is_overload)
    requests = some_exact(Random(f"exact/{seed}"), requests)
    requests = some_dropped(Random(f"drop/{seed}"), requests)
    max_batch = batch_random.choice((1, 2, 12, 12))
    graph = with_slots(some_shared(made_up_graph(Random(f"graph/{seed}")), Random(f"shared/{seed}")), slot_random)
    saving = batch_random.choice((0.0, 0.0, 0.15, 0.5))
    table = made_up_table(graph, degrees, devices_per_node, saving, usual_seconds(graph))
    table = with_components(with_states(table, Random(f"states/{seed}")), Random(f"components/{seed}"))
    made = Scenario(
        seed=seed,
        controller=ControllerConfig(
            policy=random.choice(list(SHIPPED)) if policy is None else policy,
            max_attempts=random.choice((2, 3, 5)),
            max_jobs=1000 if is_overload else random.choice((10, 1000, 1000)),
            max_residents=random.choice((1, 4, 64)),
            max_batch=max_batch,
        ),
        table=table,
        config=SimConfig(
            num_devices=num_devices,
            slots_per_node=slot_random.choice((1, 1, 2)),
            seed=seed,
            jitter=random.choice((0.0, 0.0, 0.05, 0.3)),
            dispatch_ns=random.choice((0, 500_000, 20_000_000)),
            state_copies=Random(f"copies/{seed}").choice((1, 1, 2)),
            faults=chosen if faults is None else faults,
        ),
        requests=requests,
        cancels=drawn_cancels(random, requests),
    )
    made = with_loras(made, Random(f"loras/{seed}"))
    if not changes:
        made = with_pools(made, Random(f"pools/{seed}"))
    made = with_caches(made, Random(f"caches/{seed}"))
    changing = Random(f"changes/{seed}")
    is_changing = changing.random() < 0.25
    return with_changes(made, changing) if changes or (changes is None and is_changing) else made


def _swarm_faults(seed: int) -> Faults:
    random = Random(f"faults/{seed}")
    later = [name for names in _LATER_FAULTS for name in names]
    if random.random() < 0.05:
        return Faults()
    faults = _drawn([name for name in FAULTS if name not in later], random)
    for index, names in enumerate(_LATER_FAULTS):
        faults |= _drawn(names, Random(f"later faults/{seed}" + f"/{index}" * (index > 0)))
    return Faults(faults)


def _drawn(names: Sequence[str], random: Random) -> dict[str, Fault]:
    on = [name for name in names if random.random() < 0.35]
    faults = {}
    for name in on:
        usual = FAULTS[name]
        probability = min(1.0, usual.probability * random.choice((0.3, 1.0, 3.0)))
        faults[name] = Fault(name, probability, usual.usual_size * random.choice((0.5, 1.0, 2.0)))
    return faults


def with_loras(made: Scenario, random: Random) -> Scenario:
    """Draw up to two LoRAs in a quarter of all scenarios; devices load LoRAs that have components.

    Each changes one or two components, or one that no stage has. Devices are as small as before, or have room for two.
    """
    if random.random() < 0.75:
        return made
    table = made.table
    specs = [replace(one, components=one.components or (f"part of {one.name}",)) for one in table.graph(PIPELINE).specs]
    parts = [*(part for spec in specs for part in spec.components), "of another model"]
    loras = {
        f"lora{index}": Lora(
            changes=frozenset(random.sample(parts, k=random.choice((1, 1, 2)))),
            component=Component(f"digest of lora{index}", random.randint(1, WEIGHTS_UNIT))
            if table.components
            else None,
            slowdown=random.choice((1.0, 1.1, 1.5)),
        )
        for index in range(random.choice((1, 2, 3, 6)))
    }
    memory_bytes = table.memory_bytes
    room = random.choice((0, 2, 2)) * WEIGHTS_UNIT
    return replace(
        made,
        table=replace(
            table,
            graphs={PIPELINE: Graph(PIPELINE, tuple(specs))},
            loras={PIPELINE: loras},
            memory_bytes=None if memory_bytes is None else memory_bytes + room,
        ),
        requests=_using(tuple(loras), random, made.requests),
    )


def _using(names: Sequence[str], random: Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return the same requests, of which many use one or two of these LoRAs."""
    share = random.choice((0.2, 0.7, 1.0))
    used = [
        random.sample(names, k=min(len(names), random.choice((1, 1, 2)))) if random.random() < share else []
        for _ in requests
    ]
    return tuple(
        replace(one, loras=tuple(UsedLora(name, random.choice((0.5, 1.0, 1.0))) for name in of_one))
        for one, of_one in zip(requests, used, strict=True)
    )


def with_pools(made: Scenario, random: Random) -> Scenario:
    """Draw a second pipeline in a quarter of all scenarios of a policy that keeps pools. One or both have own devices.

    The second one is like the first, with the same weights or with others.
    """
    if random.random() < 0.75 or not keeps_pools(made.controller.policy):
        return made
    table = made.table
    ids = range(made.config.num_devices)
    suffix = random.choice(("", " too"))
    both = (PIPELINE, _OTHER)
    restricted = random.choice(((PIPELINE,), both, both))
    others = {
        name: Component(one.digest + suffix, one.num_bytes) for name, one in table.components.get(PIPELINE, {}).items()
    }
    return replace(
        made,
        table=replace(
            table,
            rows=(*table.rows, *(replace(row, pipeline=_OTHER) for row in table.rows)),
            graphs={pipeline: Graph(pipeline, graph.specs) for graph in table.graphs.values() for pipeline in both},
            components={**table.components, _OTHER: others} if others else {},
            loras={pipeline: loras for loras in table.loras.values() for pipeline in both},
            devices={
                pipeline: tuple(sorted(random.sample(ids, k=random.randint(1, len(ids))))) for pipeline in restricted
            },
        ),
        requests=tuple(replace(one, pipeline=random.choice(both)) for one in made.requests),
    )


def with_caches(made: Scenario, random: Random, stds: Sequence[float] = (0.0, 0.1)) -> Scenario:
    """Draw caches in a quarter of all scenarios: requests have one, or get one if they would be late.

    The table may know it. `stds`: the standard deviations of what a cache skips of a request, one of which is drawn.
    """
    if random.random() < 0.75:
        return made
    table = made.table
    choices = (CacheChoice(CacheKind.PATCH, 0.01), CacheChoice(CacheKind.IMAGE, 0.01))
    of_steps = CacheChoice(CacheKind.FBCACHE, 0.05), CacheChoice(CacheKind.TAYLORSEER, 3.0)
    cached = [
        replace(row, seconds=row.seconds * time, cache=choices[0], skipped=1 - time, skipped_std=std)
        for time, std in ((random.choice((0.3, 0.6, 0.8)), random.choice(stds)),)
        for row in table.rows
        if row.degree == row.batch == 1 and table.graph(row.pipeline).stage(row.stage).has_steps
    ]
    share = random.choice((0.0, 0.4))
    requests = [
        one
        if one.exact or random.random() < 0.3
        else replace(one, cache=random.choice((*choices, *of_steps)))
        if random.random() < share
        else replace(one, spare_cache=random.choice(choices))
        for one in made.requests
    ]
    rows = (*table.rows, *cached) if random.random() < 0.67 else table.rows
    return replace(made, table=replace(table, rows=rows), requests=tuple(requests))


def with_changes(made: Scenario, random: Random) -> Scenario:
    """Return the scenario with models and LoRAs that come and go, for which many of its requests are.

    It stays the same if it has pools, or a policy that must know which requests will come.
    """
    if made.table.devices or isinstance(make_policy(made.controller.policy), NeedsFuture):
        return made
    names = [f"added {index}" for index in range(random.choice((1, 2, 3)))]
    share = random.choice((0.3, 0.6))
    last_ns = max(request.arrival_ns for request in made.requests)
    requests = [
        replace(one, pipeline=random.choice(names)) if random.random() < share else one for one in made.requests
    ]
    changes = drawn_changes(made.table, names, random, last_ns + 5 * NS_PER_S)
    return replace(made, requests=tuple(requests), changes=changes)


def _requests(random: Random, num_requests: int, rate_per_s: float, is_overload: bool) -> tuple[Request, ...]:
    """Poisson arrivals. In an overload, which lasts minutes, only a few of the first requests have no deadline: these
    could starve.
    """
    arrival_s = 0.0
    requests = []
    no_deadline = 0.3 if is_overload else random.choice((0.0, 0.3, 1.0))
    promised = random.choice((0.0, 0.3, 1.0))
    for index in range(num_requests):
        arrival_s += random.expovariate(rate_per_s)
        slo_s = None if random.random() < no_deadline else random.uniform(0.5, 15.0)
        if is_overload and slo_s is None and index > 20:
            slo_s = 15.0
        priority = random.choice(tuple(DEFAULT_CLASSES))
        requests.append(
            Request(
                uid=str(index),
                pipeline=PIPELINE,
                shape=Shape(*random.choice(((64, 64), (128, 128), (192, 192), (64, 192)))),
                steps=random.choice((1, 4, 10, 20)),
                arrival_ns=ns_from_s(arrival_s),
                deadline_ns=None if slo_s is None else ns_from_s(arrival_s + slo_s),
                on_miss=OnMiss.REJECT if random.random() < promised else OnMiss.BEST_EFFORT,
                tenant=random.choice(("a", "a", "a", "b")),
                priority=priority,
                weight=DEFAULT_CLASSES[priority],
                guided=random.random() < 0.7,
                preview_every=random.choice((0, 0, 0, 3)),
            )
        )
    return tuple(requests)


def some_dropped(random: Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return the same requests, of which some that are not promised are dropped if they cannot be on time."""
    share = random.choice((0.0, 0.0, 0.3, 1.0))
    return tuple(
        replace(one, on_miss=OnMiss.DROP) if one.on_miss is OnMiss.BEST_EFFORT and random.random() < share else one
        for one in requests
    )


def some_exact(random: Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return the same requests, in some scenarios with exact ones among them."""
    share = random.choice((0.0, 0.0, 0.0, 0.3, 1.0))
    return tuple(replace(request, exact=random.random() < share) for request in requests)


def drawn_cancels(random: Random, requests: tuple[Request, ...]) -> tuple[tuple[int, str], ...]:
    share = random.choice((0.0, 0.1, 0.4))
    cancelled = [request for request in requests if random.random() < share]
    return tuple((request.arrival_ns + random.randrange(6 * NS_PER_S), request.uid) for request in cancelled)
