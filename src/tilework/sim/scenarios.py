"""Scenarios for fuzzing: a cluster, a workload and faults, all from one seed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from random import Random

from tilework.control.controller import ControllerConfig
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import DeviceKind, StageSpec, StepShare
from tilework.core.lora import Lora, UsedLora
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable, graphs_of
from tilework.policy.registry import keeps_pools, policy_names
from tilework.sim.config import SimConfig
from tilework.sim.faults import FAULTS, Fault, Faults

PIPELINE, _OTHER = "fuzz", "fuzz too"
_SIDES = (64, 128, 192)
_STEP_S, _OTHERS_S = 0.1, (0.01, 0.05)  # A step, and the stages without steps, at 128 px on one device.
_MEAN_S = 0.8  # Rough mean time of a request on one device.
_WEIGHTS_UNIT = 1 << 20  # Bytes.
_SPEEDUP = 1.6  # By each doubling of the degree.
_LATER_FAULTS = ("leave", "partition", "fetch", "clock", "frontend"), ("late",), ("links",)
"""What came later is drawn by itself, so that a seed keeps its other faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, a workload and faults to run the controller on. `cancels` are (time in ns, uid)."""

    seed: int
    controller: ControllerConfig
    table: CostTable
    config: SimConfig
    requests: tuple[Request, ...]
    cancels: tuple[tuple[int, str], ...] = field(default=())

    def keeping(self, uids: Collection[str]) -> Scenario:
        """The scenario with these requests only."""
        requests = tuple(request for request in self.requests if request.uid in uids)
        cancels = tuple(cancel for cancel in self.cancels if cancel[1] in uids)
        return replace(self, requests=requests, cancels=cancels)

    def with_faults(self, faults: Faults) -> Scenario:
        return replace(self, config=replace(self.config, faults=faults))

    @property
    def faults(self) -> Faults:
        return self.config.faults


def scenario(seed: int, policy: str | None = None, faults: Faults | None = None) -> Scenario:
    """The scenario of a seed; `policy` and `faults` replace the choice of the seed.

    Each fault is on at random, independent of the others, so that some scenarios have few faults, whose effects
    others would hide.

    Source: Groce et al., Swarm Testing, ISSTA 2012.
    """
    random = Random(f"tilework/{seed}")
    num_devices = random.choice((1, 2, 2, 3, 4, 4, 8))
    devices_per_node = random.choice((1, 2, 4, 8))
    degrees = random.choice(((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)))
    chosen = _swarm_faults(seed)
    batch_random, slot_random = Random(f"batches/{seed}"), Random(f"slots/{seed}")
    is_overload = random.random() < 0.04
    if is_overload:
        num_devices = 1
    rate = random.uniform(1.1, 1.6) if is_overload else random.choice((0.4, 0.8, 1.2, 3.0))
    num_requests = 400 if is_overload else random.randint(4, 90)
    requests = _requests(random, num_requests, rate * num_devices / _MEAN_S, is_overload)
    requests = _some_exact(Random(f"exact/{seed}"), requests)
    requests = _some_dropped(Random(f"drop/{seed}"), requests)
    max_batch = batch_random.choice((1, 2, 12, 12))
    table = _with_components(
        _with_states(
            _table(
                _with_slots(_some_shared(_graph(Random(f"graph/{seed}")), Random(f"shared/{seed}")), slot_random),
                degrees,
                devices_per_node,
                batch_random.choice((0.0, 0.0, 0.15, 0.5)),
            ),
            Random(f"states/{seed}"),
        ),
        Random(f"components/{seed}"),
    )
    made = Scenario(
        seed=seed,
        controller=ControllerConfig(
            policy=random.choice(policy_names()) if policy is None else policy,
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
        cancels=_cancels(random, requests),
    )
    made = _with_pools(_with_loras(made, Random(f"loras/{seed}")), Random(f"pools/{seed}"))
    return _with_caches(made, Random(f"caches/{seed}"))


def _swarm_faults(seed: int) -> Faults:
    random, later = Random(f"faults/{seed}"), [name for names in _LATER_FAULTS for name in names]
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


def _graph(random: Random) -> Graph:
    """A latent diffusion pipeline, or a made-up one: encoders that join, stages with steps one after another, others.

    An upscaler, or what else runs at once, may lie between two stages with steps, or after the last.
    """
    usual = latent_diffusion(PIPELINE)
    if random.random() < 0.6:
        return usual
    num_encoders = random.choice((0, 1, 2))
    encoders = [StageSpec(name=f"encoder{index}", outputs=(f"text{index}",)) for index in range(num_encoders)]
    specs, latest = list(encoders), [name for spec in encoders for name in spec.outputs]
    num_stepped = random.choice((1, 2, 2, 3))
    shares = [index / num_stepped for index in range(num_stepped + 1)]
    for index, (first, last) in enumerate(pairwise(shares)):
        specs.append(
            StageSpec(
                name=f"steps{index}",
                inputs=tuple(latest),
                outputs=(f"latents{index}",),
                steps=StepShare(first=first, last=last) if random.random() < 0.8 else StepShare(count=3),
                degrees=None,
                batchable=(share := random.random()) < 0.8,
                one_shape=share < 0.2,
            )
        )
        latest = [f"latents{index}"]
        if random.random() < 0.3 or index == num_stepped - 1:
            specs.append(
                StageSpec(
                    name=f"after{index}",
                    inputs=(*latest, *(encoders[0].outputs if encoders and random.random() < 0.5 else ())),
                    outputs=(f"picture{index}",),
                    sliceable=random.random() < 0.5,
                )
            )
            latest = [f"picture{index}"]
    random.shuffle(specs)
    return Graph(PIPELINE, tuple(specs))


def _some_shared(graph: Graph, random: Random) -> Graph:
    """The same graph, in half of all scenarios with stages without steps that several requests may share."""
    if random.random() < 0.5:
        return graph
    specs = [
        spec if spec.steps else replace(spec, batchable=random.random() < 0.7, one_shape=random.random() < 0.5)
        for spec in graph.specs
    ]
    return Graph(graph.pipeline, tuple(specs))


def _with_slots(graph: Graph, random: Random) -> Graph:
    """In a third of all scenarios each stage that runs at once runs on a CPU slot or on an accelerator, by chance."""
    if random.random() < 0.67:
        return graph
    kinds = tuple(DeviceKind)
    specs = [spec if spec.steps else _on(random.choice(kinds), spec) for spec in graph.specs]
    return Graph(graph.pipeline, tuple(specs))


def _on(kind: DeviceKind, spec: StageSpec) -> StageSpec:
    return replace(spec, device_kind=kind, batchable=spec.batchable and kind is not DeviceKind.CPU)


def _table(graph: Graph, degrees: tuple[int, ...], devices_per_node: int, saving: float) -> CostTable:
    """`saving`: share of its time that each member of a batch beyond the first saves; 0: no batch is measured."""
    others_s = cycle(_OTHERS_S)
    seconds = {stage: _STEP_S if stage.has_steps else next(others_s) for stage in graph.stages}
    alone = [
        CostRow(
            pipeline=PIPELINE,
            stage=stage.name,
            height=side,
            width=side,
            degree=degree,
            seconds=seconds[stage] * (side / 128) ** 2 / _SPEEDUP ** (degree.bit_length() - 1),
        )
        for side in _SIDES
        for stage in graph.stages
        for degree in (degrees if stage.is_parallel else (1,))
    ]
    together = [
        replace(row, batch=size, seconds=row.seconds * (size - saving * (size - 1)))
        for row in alone
        for size in (2, 12)
        if saving and graph.stage(row.stage).spec.batchable and row.degree == 1
    ]
    return CostTable(
        hardware="made up, for fuzzing",
        devices_per_node=devices_per_node,
        rows=(*alone, *together),
        graphs=graphs_of(graph),
    )


def _with_states(table: CostTable, random: Random) -> CostTable:
    """In half of all scenarios it is known how large states are, so that what fetches take is planned with."""
    if random.random() < 0.5:
        return table
    return replace(table, rows=tuple(replace(row, state_bytes=1) for row in table.rows))


def _with_components(table: CostTable, random: Random) -> CostTable:
    """In a third of all scenarios stages need weights, and devices and hosts may be too small for those of all stages.

    A stage has one or two components, which others may share.
    """
    if random.random() < 0.67:
        return table
    stages = table.graph(PIPELINE).stages
    sizes = {f"weights{index}": random.choice((1, 2, 4, 8)) * _WEIGHTS_UNIT for index in range(len(stages))}
    needed = [random.sample(sorted(sizes), k=random.choice((1, 1, 2)) if len(sizes) > 1 else 1) for _ in stages]
    specs = [replace(stage.spec, components=tuple(names)) for stage, names in zip(stages, needed, strict=True)]
    least, most = max(sum(map(sizes.__getitem__, names)) for names in needed), sum(sizes.values())
    seconds = random.choice((0.001, 0.02, 0.1))
    return replace(
        table,
        graphs={PIPELINE: Graph(PIPELINE, tuple(specs))},
        components={PIPELINE: {name: Component(f"digest of {name}", size) for name, size in sizes.items()}},
        memory_bytes=random.choice((None, least, least, random.randint(least, most), most)),
        load_bytes_per_s={
            source: _WEIGHTS_UNIT / seconds * speed
            for source, speed in ((LoadSource.DISK, 1), (LoadSource.HOST, 8), (LoadSource.PEER, 4))
            if source is LoadSource.DISK or random.random() < 0.5
        },
        host_bytes=random.choice((None, None, 0, random.randint(least, most))),
    )


def _with_loras(made: Scenario, random: Random) -> Scenario:
    """In a quarter of all scenarios requests use up to two LoRAs, which devices load where these have components.

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
            component=Component(f"digest of lora{index}", random.randint(1, _WEIGHTS_UNIT))
            if table.components
            else None,
            slowdown=random.choice((1.0, 1.1, 1.5)),
        )
        for index in range(random.choice((1, 2, 3, 6)))
    }
    memory_bytes, room = table.memory_bytes, random.choice((0, 2, 2)) * _WEIGHTS_UNIT
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
    """The same requests, of which many use one or two of these LoRAs."""
    share = random.choice((0.2, 0.7, 1.0))
    used = [
        random.sample(names, k=min(len(names), random.choice((1, 1, 2)))) if random.random() < share else []
        for _ in requests
    ]
    return tuple(
        replace(one, loras=tuple(UsedLora(name, random.choice((0.5, 1.0, 1.0))) for name in of_one))
        for one, of_one in zip(requests, used, strict=True)
    )


def _with_pools(made: Scenario, random: Random) -> Scenario:
    """In a quarter of all scenarios of a policy that keeps pools, a second pipeline. One or both have own devices.

    The second one is like the first, with the same weights or with others.
    """
    if random.random() < 0.75 or not keeps_pools(made.controller.policy):
        return made
    table, ids, suffix = made.table, range(made.config.num_devices), random.choice(("", " too"))
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


def _with_caches(made: Scenario, random: Random) -> Scenario:
    """In a quarter of all scenarios requests have a cache, or get one if they would be late. The table may know it."""
    if random.random() < 0.75:
        return made
    table, choices = made.table, (CacheChoice(CacheKind.PATCH, 0.01), CacheChoice(CacheKind.IMAGE, 0.01))
    of_steps = CacheChoice(CacheKind.FBCACHE, 0.05), CacheChoice(CacheKind.TAYLORSEER, 3)
    cached = [
        replace(row, seconds=row.seconds * time, cache=choices[0], skipped=1 - time, skipped_std=std)
        for time, std in ((random.choice((0.3, 0.6, 0.8)), random.choice((0.0, 0.1))),)
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


def _requests(random: Random, num_requests: int, rate_per_s: float, is_overload: bool) -> tuple[Request, ...]:
    """Poisson arrivals. In an overload, which lasts minutes, only a few of the first requests have no deadline: these
    could starve.
    """
    arrival_s, requests = 0.0, []
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


def _some_dropped(random: Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The same requests, of which some that are not promised are dropped if they cannot be on time."""
    share = random.choice((0.0, 0.0, 0.3, 1.0))
    return tuple(
        replace(one, on_miss=OnMiss.DROP) if one.on_miss is OnMiss.BEST_EFFORT and random.random() < share else one
        for one in requests
    )


def _some_exact(random: Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The same requests, in some scenarios with exact ones among them."""
    share = random.choice((0.0, 0.0, 0.0, 0.3, 1.0))
    return tuple(replace(request, exact=random.random() < share) for request in requests)


def _cancels(random: Random, requests: tuple[Request, ...]) -> tuple[tuple[int, str], ...]:
    share = random.choice((0.0, 0.1, 0.4))
    cancelled = [request for request in requests if random.random() < share]
    return tuple((request.arrival_ns + random.randrange(6 * NS_PER_S), request.uid) for request in cancelled)
