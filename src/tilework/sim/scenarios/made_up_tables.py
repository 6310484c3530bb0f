"""Made-up pipelines and their costs, for scenarios: all from random generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from math import exp, log
from random import Random

from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import DeviceKind, Stage, StageSpec, StepShare
from tilework.cost.table import CostTable, graphs_of

PIPELINE = "fuzz"
WEIGHTS_UNIT = 1 << 20  # Bytes.
_SIDES = (64, 128, 192)
_STEP_S = 0.1  # At 128 px on one device.
_OTHERS_S = (0.01, 0.05)  # Stages without steps, at 128 px on one device.
_SPEEDUP = 1.6  # Gain of each doubling of the degree.
# Ranges of drawn times.
_STEPS_RANGE_S = (0.001, 2.0)
_OTHERS_RANGE_S = (0.001, 4.0)
StageSeconds = Callable[[Stage, int, int], float]
"""Draws the time of a step, or of a stage without steps, at a side in pixels and a degree."""


def made_up_graph(random: Random) -> Graph:
    """Return a latent diffusion pipeline, or a made-up one: encoders that join, stages with steps one after another,
    others.

    An upscaler, or what else runs at once, may lie between two stages with steps, or after the last.
    """
    usual = latent_diffusion(PIPELINE)
    if random.random() < 0.6:
        return usual
    num_encoders = random.choice((0, 1, 2))
    encoders = [StageSpec(name=f"encoder{index}", outputs=(f"text{index}",)) for index in range(num_encoders)]
    specs = list(encoders)
    latest = [name for spec in encoders for name in spec.outputs]
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


def some_shared(graph: Graph, random: Random) -> Graph:
    """Return the same graph, in half of all scenarios with stages without steps that several requests may share."""
    if random.random() < 0.5:
        return graph
    specs = [
        spec if spec.steps else replace(spec, batchable=random.random() < 0.7, one_shape=random.random() < 0.5)
        for spec in graph.specs
    ]
    return Graph(graph.pipeline, tuple(specs))


def with_slots(graph: Graph, random: Random) -> Graph:
    """Draw the devices of stages: in a third of all scenarios each stage without steps runs on a CPU slot or an
    accelerator, by chance.
    """
    if random.random() < 0.67:
        return graph
    kinds = tuple(DeviceKind)
    specs = [spec if spec.steps else _on(random.choice(kinds), spec) for spec in graph.specs]
    return Graph(graph.pipeline, tuple(specs))


def _on(kind: DeviceKind, spec: StageSpec) -> StageSpec:
    return replace(spec, device_kind=kind, batchable=spec.batchable and kind is not DeviceKind.CPU)


def with_wide_stages(graph: Graph, random: Random) -> Graph:
    """Return the same graph, of which each stage without steps may be shared by several devices, by chance."""
    specs = [
        spec
        if spec.steps or spec.device_kind is DeviceKind.CPU or random.random() < 0.5
        else replace(spec, degrees=random.choice((None, (1, 2), (1, 2, 4))))
        for spec in graph.specs
    ]
    return Graph(graph.pipeline, tuple(specs))


def usual_seconds(graph: Graph) -> StageSeconds:
    """Return times in proportion to the pixels, which all devices of a group save alike."""
    others_s = cycle(_OTHERS_S)
    seconds = {stage: _STEP_S if stage.has_steps else next(others_s) for stage in graph.stages}
    return lambda stage, side, degree: seconds[stage] * (side / 128) ** 2 / _SPEEDUP ** (degree.bit_length() - 1)


def drawn_seconds(graph: Graph, random: Random) -> StageSeconds:
    """Return times drawn for each stage and size: steps of 1 ms to 2 s, others of 1 ms to 4 s.

    A larger size takes no less. What a doubling of the devices saves is drawn for each size, too: it may cost time.
    """
    seconds: dict[tuple[Stage, int], float] = {}
    for stage in graph.stages:
        least, most = map(log, _STEPS_RANGE_S if stage.has_steps else _OTHERS_RANGE_S)
        drawn = sorted(exp(random.uniform(least, most)) for _ in _SIDES)
        seconds |= {(stage, side): one for side, one in zip(_SIDES, drawn, strict=True)}
    speedups = {side: random.uniform(0.9, 1.95) for side in _SIDES}
    return lambda stage, side, degree: seconds[stage, side] / speedups[side] ** (degree.bit_length() - 1)


def made_up_table(
    graph: Graph, degrees: tuple[int, ...], devices_per_node: int, saving: float, seconds: StageSeconds
) -> CostTable:
    """Return a table; `saving` is the share of time that each further member of a batch saves, 0: no batches."""
    alone = [
        CostRow(
            pipeline=graph.pipeline,
            stage=stage.name,
            height=side,
            width=side,
            degree=degree,
            seconds=seconds(stage, side, degree),
        )
        for side in _SIDES
        for stage in graph.stages
        for degree in degrees
        if stage.allows(degree)
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


def with_states(table: CostTable, random: Random) -> CostTable:
    """Draw whether sizes of states are known, in half of all scenarios, so that plans include the times of fetches."""
    if random.random() < 0.5:
        return table
    return replace(table, rows=tuple(replace(row, state_bytes=1) for row in table.rows))


def with_components(table: CostTable, random: Random) -> CostTable:
    """Draw weights of stages in a third of all scenarios; devices and hosts may be too small for those of all stages.

    A stage has one or two components, which others may share.
    """
    if random.random() < 0.67:
        return table
    stages = table.graph(PIPELINE).stages
    sizes = {f"weights{index}": random.choice((1, 2, 4, 8)) * WEIGHTS_UNIT for index in range(len(stages))}
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
            source: WEIGHTS_UNIT / seconds * speed
            for source, speed in ((LoadSource.DISK, 1), (LoadSource.HOST, 8), (LoadSource.PEER, 4))
            if source is LoadSource.DISK or random.random() < 0.5
        },
        host_bytes=random.choice((None, None, 0, random.randint(least, most))),
    )
