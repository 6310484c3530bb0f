"""How a budget divides among a primary and its auxiliaries."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.policy.placement.roles import PlacementType, VirtualReplica
from tilework.policy.placement.split import keeps_pace, split

EDC, DC, ED, D, E, C = PlacementType
V0, V1, V2, V3 = VirtualReplica

RATES = st.fixed_dictionaries(dict.fromkeys(PlacementType, st.floats(0.001, 100)))
WHOLE_RATES = st.fixed_dictionaries(dict.fromkeys(PlacementType, st.integers(1, 30).map(float)))
"""Quotients of these are exact where they are whole."""
UNITS = st.fixed_dictionaries({EDC: st.just(1), DC: st.sampled_from((1, 2, 4)), C: st.sampled_from((1, 2, 4))})


def ways(replica: VirtualReplica, budget: int) -> list[dict[PlacementType, int]]:
    """All divisions of a budget with something for each type."""
    counts = product(range(1, budget + 1), repeat=len(replica.types))
    return [dict(zip(replica.types, way, strict=True)) for way in counts if sum(way) == budget]


@given(st.sampled_from(VirtualReplica), st.integers(0, 200), RATES, UNITS)
def test_auxiliaries_keep_pace_or_the_budget_is_tiny(
    replica: VirtualReplica, more: int, rates: dict[PlacementType, float], units: dict[PlacementType, int]
) -> None:
    least = {kind: units.get(kind, 1) for kind in replica.types}
    budget = sum(least.values()) + more
    counts = split(replica, budget, rates, units)
    assert counts.keys() == set(replica.types)
    assert sum(counts.values()) == budget
    assert all(counts[kind] >= least[kind] for kind in replica.types), "a unit of each"
    tiny = counts[replica.primary] == least[replica.primary]
    assert keeps_pace(replica, counts, rates) or tiny


@given(st.sampled_from((V1, V2, V3)), st.integers(3, 14), WHOLE_RATES)
def test_no_split_that_keeps_pace_has_more_primaries(
    replica: VirtualReplica, budget: int, rates: dict[PlacementType, float]
) -> None:
    """So an auxiliary has nothing to lend to a primary that is to become a multiple of the widest degree."""
    counts = split(replica, budget, rates, {})
    most = max((way[replica.primary] for way in ways(replica, budget) if keeps_pace(replica, way, rates)), default=1)
    assert counts[replica.primary] == most


@pytest.mark.parametrize(
    ("replica", "budget", "rates", "units", "counts"),
    [
        (V0, 7, {EDC: 3.0}, {}, {EDC: 7}),
        (V1, 8, {DC: 1.0, E: 1000.0}, {}, {DC: 7, E: 1}),  # The paper's formula: 8 / 1.001, rounded down.
        (V2, 88, {ED: 1 / 181, C: 1 / 13.5}, {C: 2}, {ED: 80, C: 8}),  # Units of 2: 81 and 7 would waste one.
        (V2, 9, {ED: 1.0, C: 1.0}, {}, {ED: 4, C: 5}),
        (V3, 10, {D: 1.0, E: 4.0, C: 2.0}, {}, {D: 5, E: 2, C: 3}),  # 5.7, 1.4 and 2.9: no 6 keep pace.
        (V3, 13, {D: 1.0, E: 2.0, C: 2.9}, {}, {D: 6, E: 4, C: 3}),  # 7 need 14; the rest goes where most is lacking.
        (V3, 33, {D: 1.0, E: 1.0, C: 5.0}, {}, {D: 15, E: 15, C: 3}),  # The quotient is a little less than 15.
        (V3, 3, {D: 9.0, E: 1.0, C: 1.0}, {}, {D: 1, E: 1, C: 1}),  # Tiny: feasible before proportional.
        (V3, 5, {D: 9.0, E: 2.0, C: 1.0}, {}, {D: 1, E: 2, C: 2}),
    ],
)
def test_split_by_hand(
    replica: VirtualReplica,
    budget: int,
    rates: dict[PlacementType, float],
    units: dict[PlacementType, int],
    counts: dict[PlacementType, int],
) -> None:
    assert split(replica, budget, rates, units) == counts


def test_a_budget_below_one_unit_of_each_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 devices are less than one unit of each type of V2"):
        split(V2, 3, {ED: 1.0, C: 1.0}, {ED: 2, C: 2})


def test_equal_rates_keep_pace_however_they_are_rounded() -> None:
    rates = {PlacementType.DC: 1 / 4255, PlacementType.E: 1 / 851}
    assert 3 * rates[PlacementType.E] < 15 * rates[PlacementType.DC], "by rounding"
    assert keeps_pace(VirtualReplica.V1, {PlacementType.DC: 15, PlacementType.E: 3}, rates)
    assert not keeps_pace(VirtualReplica.V1, {PlacementType.DC: 16, PlacementType.E: 3}, rates)
