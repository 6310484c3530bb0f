"""Pipelines that need more devices than their share: they are divided otherwise, or take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PIPELINE, job, request, table
from placements import footprints, nodes_of, staged_table
from policy.published.tridentserve_runs import serve
from tilework.core.component import Component
from tilework.core.policy import CostModel
from tilework.core.request import Request, cost_key
from tilework.cost.table import CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.feasible import FitsAt, Footprint, fits_at, is_placeable
from tilework.policy.placement.placement import Nodes
from tilework.policy.placement.profile import ClassProfile
from tilework.policy.placement.roles import PlacementType
from tilework.policy.published.tridentserve.division import Divider, Division
from tilework.policy.published.tridentserve.layout import PoolLayout
from tilework.policy.published.tridentserve.orchestration import Orchestration
from tilework.policy.published.tridentserve.ways import Profiles, Ways
from tilework.policy.toolkit.tasks import TaskReader

COSTS = TableCosts(staged_table())


def renamed(pipeline: str, known: CostTable) -> CostTable:
    """The same for a pipeline of another name, with weights of its own."""
    parts = {name: Component(f"{pipeline} {name}", one.num_bytes) for name, one in known.components[PIPELINE].items()}
    rows = tuple(replace(row, pipeline=pipeline) for row in known.rows)
    graphs = {pipeline: replace(known.graphs[PIPELINE], pipeline=pipeline)}
    return replace(known, rows=rows, graphs=graphs, components={pipeline: parts})


class Known(Profiles):
    """Profiles of pipelines that fit as given."""

    def __init__(self, fits: Mapping[str, FitsAt]) -> None:
        super().__init__()
        profile = Profiles().of(request("a", side=64), COSTS)
        self._profiles = {pipeline: replace(profile, fits=some) for pipeline, some in fits.items()}

    def of(self, request: Request, costs: CostModel) -> ClassProfile:
        return self._profiles[request.pipeline]


def divided(fits: Mapping[str, FitsAt], nodes: Nodes, counts: Sequence[int] | None = None) -> Division:
    """The division among pipelines that fit as given, the most urgent first."""
    asked = [replace(request(name), pipeline=name) for name in fits]
    known = list(zip(asked, counts or [1] * len(asked), strict=True))
    known.sort(key=lambda one: one[0].pipeline)
    turns = [cost_key(one) for one in asked]
    divider = Divider(profiles=Known(fits), costs=COSTS, before=PoolLayout.colocated(nodes), by="device_time")
    return divider.divide(known, turns)


APART: FitsAt = {kind: (1,) for kind in PlacementType if kind is not PlacementType.EDC}
"""On each virtual replica but V0, on one device of each type: two devices at least."""


def served(division: Division, fits: Mapping[str, FitsAt]) -> set[str]:
    return {pipeline for pipeline, some in fits.items() if division.layout.replicas(pipeline, some)}


@settings(max_examples=40, deadline=None)
@given(some=st.lists(footprints(), min_size=1, max_size=4), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_the_most_urgent_class_that_the_devices_can_serve_has_devices(some: list[Footprint], sizes: list[int]) -> None:
    fits = {str(index): fits_at(footprint) for index, footprint in enumerate(some)}
    able = [pipeline for pipeline, one in fits.items() if is_placeable(one, nodes_of(sizes))]
    assert set(able[:1]) <= served(divided(fits, nodes_of(sizes)), fits) <= set(able)


def test_the_order_of_turns_is_that_of_urgency() -> None:
    nodes = nodes_of((2, 1))
    for names in ("ab", "ba"):
        fits = dict.fromkeys(names, APART)
        division = divided(fits, nodes)
        assert served(division, fits) == {names[0]}
        assert "1 requests wait for their turn: devices are too few for all at once" in division.reasons


@pytest.mark.parametrize("counts", [(1, 1), (9, 1), (1, 9)])
def test_neighbours_are_divided_where_whole_nodes_are_too_small(counts: tuple[int, int]) -> None:
    """Two need two devices each, of a node of three and a node of one."""
    fits = dict.fromkeys("ab", APART)
    assert served(divided(fits, nodes_of((3, 1)), counts), fits) == {"a", "b"}


def test_a_placement_must_fit_on_the_nodes_and_not_only_on_as_many_devices() -> None:
    """Otherwise a class that could take turns with itself would wait for what there is not."""
    fits: FitsAt = {PlacementType.DC: (2,), PlacementType.E: (2,)}
    assert not is_placeable(fits, nodes_of((2, 1, 1)))
    assert is_placeable(fits, nodes_of((2, 2)))


@pytest.mark.parametrize(("per_node", "is_switch_refused"), [(2, False), (3, False), (2, True)])
def test_pipelines_that_cannot_have_devices_at_once_take_turns(
    per_node: int, is_switch_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three needs a device for its decode and one for the rest, of three devices."""
    if is_switch_refused:
        monkeypatch.setattr(Orchestration, "_reason", lambda *_: "the test wants it")
        monkeypatch.setattr(Orchestration, "_is_worthwhile", lambda *_: False)
    three = merged([renamed(name, staged_table()) for name in "abc"])
    asked = [request(f"{name}{n}", 40.0 * n, side=64, steps=2, slo_s=None) for n in range(3) for name in "abc"]
    asked = [replace(one, pipeline=one.uid[0]) for one in asked]
    seen = serve(asked, table=replace(three, devices_per_node=per_node), num_devices=3, limit_s=3600)
    assert max(one.finish_ns - one.request.arrival_ns for one in seen.done.endings) < 90e9


def test_a_request_runs_at_the_least_degree_that_fits_if_its_devices_are_too_few_for_an_efficient_one() -> None:
    """It does not fit on one device, two are no quicker than one, and its pipeline has no four, as others have."""
    costs = TableCosts(with_slow_pairs(table(degrees=(1, 2, 4))))
    asked = request("a")
    task = TaskReader({}, costs, 4, 0).read(job(0, asked))
    assert task is not None
    ways = Ways(PoolLayout.colocated(nodes_of((2,))), Known({PIPELINE: {PlacementType.EDC: (2, 4)}}), costs).of(task)
    assert [way.degree for way in ways] == [2]


def with_slow_pairs(known: CostTable) -> CostTable:
    """Steps take as long on two devices as on one, and a quarter on four."""
    alone = {(row.stage, row.shape): row.seconds for row in known.rows if row.degree == 1}
    parts = {1: 1.0, 2: 1.0, 4: 0.25}
    return replace(
        known,
        rows=tuple(replace(row, seconds=alone[row.stage, row.shape] * parts[row.degree]) for row in known.rows),
    )
