"""How many instances services have: by the times of stages, and by how busy they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.policy.placement.utilisation import Use, UtilisationRule, proportional

RULE = UtilisationRule()


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 30))
def test_theorem_1(k: int, x_s: int, y_s: int) -> None:
    """With K + ceil(K T_Y / T_X) instances, both stages keep up with K / T_X requests per second, as the paper's do."""
    counts = proportional({"x": x_s, "y": y_s}, k + ceil(k * y_s / x_s))
    assert min(counts["x"] / x_s, counts["y"] / y_s) >= k / x_s


@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 6)])
def test_the_examples_of_section_5(k: int, m: int) -> None:
    assert proportional({"x": 4, "y": 12}, k + m) == {"x": k, "y": m}


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 50), min_size=1), st.integers(3, 10))
def test_no_division_takes_a_higher_rate(loads: Mapping[str, int], num: int) -> None:
    counts = proportional(loads, num)
    assert sum(counts.values()) == num
    rate = min(counts[key] / loads[key] for key in loads)
    for split in _splits(num, len(loads)):
        assert min(one / load for one, load in zip(split, loads.values(), strict=True)) <= rate + 1e-9


def _splits(num: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(num,)]
    return [(first, *rest) for first in range(1, num - parts + 2) for rest in _splits(num - first, parts - 1)]


def use(**shares: tuple[int, float]) -> dict[str, Use]:
    return {name: Use(num, share) for name, (num, share) in shares.items()}


@pytest.mark.parametrize(
    ("uses", "num_idle", "givers"),
    [
        (use(d=(10, 0.85), c=(10, 0.1)), 5, None),  # At the threshold, not above it.
        (use(d=(10, 0.86), c=(10, 0.1)), 0, ["c"]),
        (use(d=(10, 0.86), c=(10, 0.1)), 5, [None]),  # Idle ones first.
        (use(d=(10, 1.2), c=(10, 0.1)), 2, [None, None, "c", "c", "c"]),  # 15 would be busy for 80%.
        (use(d=(6, 0.9), e=(3, 0.3), c=(3, 0.2)), 0, ["c"]),
        (use(d=(10, 1.2), e=(4, 0.3), c=(4, 0.2)), 0, ["c", "e", "c", "e"]),  # A third would leave 80% to one.
        (use(d=(4, 1.0), c=(2, 0.4)), 0, None),  # The other would be at 80%, within the margin.
        (use(d=(4, 1.0), c=(2, 0.37)), 0, ["c"]),
        (use(d=(4, 1.0), c=(1, 0.01)), 0, None),  # Its last one, which has something to do.
        (use(d=(4, 1.0), c=(1, 0.0)), 0, ["c"]),
        (use(d=(2, 1.0), e=(2, 1.0)), 0, None),
        (use(), 3, None),
    ],
)
def test_who_gives(uses: Mapping[str, Use], num_idle: int, givers: Sequence[str | None] | None) -> None:
    change = RULE.reassignment(uses, num_idle)
    assert (None if change is None else list(change.givers)) == givers
    if change is not None:
        assert change.to == "d"


def test_the_reason() -> None:
    change = RULE.reassignment(use(d=(10, 1.0), c=(10, 0.25)), 1)
    assert change is not None
    assert change.why == "over 300 s, d was asked for 100% of its time; it gets 1 idle, 1 of c (25%)"


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 20), st.floats(0, 3)), min_size=1),
    st.integers(0, 4),
)
def test_what_gave_is_not_taken_back_at_the_same_load(services: Mapping[str, tuple[int, float]], num_idle: int) -> None:
    """After a change, no service that gave is too busy, were the load as before; nor has any more given than it has."""
    uses = use(**services)
    change = RULE.reassignment(uses, num_idle)
    if change is None:
        return
    assert change.givers.count(None) <= num_idle
    for key in set(change.givers) - {None}:
        num = change.givers.count(key)
        assert num <= uses[key].num_instances
        assert uses[key].share_with(-num) <= RULE.threshold - RULE.margin
