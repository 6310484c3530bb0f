"""Changes of models and LoRAs that are drawn from a random generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tilework.core.component import Component
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec
from tilework.core.lora import Lora
from tilework.cost.table import CostTable, graphs_of, only, renamed
from tilework.sim.models.catalog import AddLora, Change, RemoveLora, RemoveModel, ServeModel, TimedChange
from tilework.sim.scenarios.made_up_tables import (
    PIPELINE,
    WEIGHTS_UNIT,
    made_up_graph,
    made_up_table,
    usual_seconds,
    with_slots,
    with_states,
)

_NEW_LORA = "new"


def drawn_changes(table: CostTable, names: Sequence[str], random: Random, end_ns: int) -> tuple[TimedChange, ...]:
    """Draw up to 16 changes of a server with this table of one pipeline; others come under these names, and go.

    Some ask for what cannot be: a name that is taken or is none, costs that cannot be used.
    """
    times_ns = sorted(random.randrange(end_ns) for _ in range(random.randint(2, 16)))
    return tuple(
        TimedChange(number=number, at_ns=at_ns, change=_drawn(table, names, random, number))
        for number, at_ns in enumerate(times_ns)
    )


def _drawn(table: CostTable, names: Sequence[str], random: Random, number: int) -> Change:
    name = random.choice((*names, *names, PIPELINE))
    kind = random.random()
    if kind < 0.5:
        return _model(table, name, random, number)
    if kind < 0.75:
        return RemoveModel(pipeline=name)
    lora = random.choice((_NEW_LORA, *table.loras.get(PIPELINE, {})))
    if kind < 0.9:
        parts = [part for spec in table.graph(PIPELINE).specs for part in spec.components]
        return AddLora(pipeline=name, name=lora, lora=_lora(table, parts, random, number))
    return RemoveLora(pipeline=name, name=lora)


def _model(table: CostTable, name: str, random: Random, number: int) -> ServeModel:
    """Return a model with the same weights as that of the table, with others, with other stages, or one that is
    unusable.
    """
    kind = random.choice(("same weights", "other weights", "other stages", "other stages", "unusable"))
    made = _alike(table, name) if kind != "other stages" else _with_other_stages(table, name, random, number)
    if kind == "other weights":
        made = replace(
            made,
            components={
                pipeline: {part: Component(f"{one.digest}, {number}", one.num_bytes) for part, one in named.items()}
                for pipeline, named in made.components.items()
            },
        )
    factor = random.choice((1.0, 1.0, 0.25, 4.0))
    made = replace(made, rows=tuple(replace(row, seconds=row.seconds * factor) for row in made.rows))
    return ServeModel(costs=made) if kind != "unusable" else ServeModel(costs=_spoilt(made, random), is_unusable=True)


def _alike(table: CostTable, name: str) -> CostTable:
    graph = Graph(name, table.graph(PIPELINE).specs)
    return replace(renamed(only(table, PIPELINE), name), graphs=graphs_of(graph), sources={})


def _with_other_stages(table: CostTable, name: str, random: Random, number: int) -> CostTable:
    graph = made_up_graph(random)
    if table.needs_slots:  # A server has CPU slots from its start, or none.
        graph = with_slots(graph, random)
    units = 8 if table.memory_bytes is None else table.memory_bytes // WEIGHTS_UNIT
    specs = [replace(spec, components=(f"weights{index}",)) for index, spec in enumerate(graph.specs)]
    graph = Graph(name, tuple(specs))
    degrees = tuple(sorted({row.degree for row in table.rows}))
    saving = 0.15 if table.has_batches else 0.0
    made = made_up_table(graph, degrees, table.devices_per_node, saving, usual_seconds(graph))
    if any(row.state_bytes for row in table.rows):
        made = with_states(made, random)
    sizes = {spec.components[0]: random.randint(1, min(8, units)) * WEIGHTS_UNIT for spec in specs}
    named = {part: Component(f"{part} of change {number}", size) for part, size in sizes.items()}
    return replace(
        _alike(table, name),
        rows=made.rows,
        graphs=graphs_of(graph),
        components={name: named} if table.components else {},
        loras={name: _loras_like(table, specs, random, number)} if table.loras else {},
    )


def _loras_like(table: CostTable, specs: Sequence[StageSpec], random: Random, number: int) -> dict[str, Lora]:
    """Return LoRAs of the same names for other stages."""
    parts = [part for spec in specs for part in spec.components]
    return {name: _lora(table, parts, random, number) for name in table.loras[PIPELINE]}


def _lora(table: CostTable, parts: Sequence[str], random: Random, number: int) -> Lora:
    changed = [random.choice(parts)] if parts else ["of another model"]
    size = random.randint(1, WEIGHTS_UNIT)
    component = Component(f"LoRA of change {number}, {size}", size) if table.components else None
    return Lora(changes=frozenset(changed), component=component, slowdown=random.choice((1.0, 1.2)))


def _spoilt(made: CostTable, random: Random) -> CostTable:
    """Return costs that cannot be used: of another machine, or with a row of an unknown stage."""
    if random.random() < 0.5:
        return replace(made, hardware="another machine")
    return replace(made, rows=(*made.rows, replace(made.rows[0], stage="export", degree=1)))
