"""A covering set: few rows, in which each pair of levels of two factors occurs together at least once.

Written here since rows must avoid what is refused. Libraries that are kept (allpairspy 2.5.1) only filter whole rows: a
row that has an excluded pair is dropped with all its other pairs, or, filtered while it grows, left shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from random import Random

Place = tuple[str, int]
"""A factor, and one of its levels."""
Row = dict[str, int]

_CANDIDATES = 10
"""Rows that are made for each that is kept, which is the one with most pairs that no earlier one had."""


class NoSuchRow(ValueError):
    """A pair is in no row: each would have one that is excluded, so that it should be excluded itself."""


def covering_rows(
    factors: Mapping[str, Collection[int]], excluded: Collection[frozenset[Place]], seed: int
) -> tuple[Row, ...]:
    """Rows with a level of each factor, the same for the same seed. `excluded` are pairs of places.

    Raises NoSuchRow.
    """
    random, without = Random(seed), _Pairs(excluded)
    left = _Pairs(all_pairs(factors) - set(excluded))
    rows = list[Row]()
    while first := left.first():
        made = [_row(factors, first, left, without, random) for _ in range(_CANDIDATES)]
        if not any(made):
            raise NoSuchRow(f"no row has {' and '.join(f'{name} {level}' for name, level in first)}")
        rows.append(max((row for row in made if row), key=left.number_in))
        left.remove(rows[-1])
    return tuple(rows)


def pairs_of(row: Mapping[str, int]) -> set[frozenset[Place]]:
    """Those that a row has."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Collection[int]]) -> set[frozenset[Place]]:
    """Those of levels of two factors."""
    places = [(name, level) for name in sorted(factors) for level in factors[name]]
    return {frozenset((one, other)) for one, other in combinations(places, 2) if one[0] != other[0]}


class _Pairs:
    """Pairs of places that can be counted, with a row at a time."""

    def __init__(self, pairs: Collection[frozenset[Place]]) -> None:
        self._others: dict[Place, set[Place]] = {}
        for one, other in pairs:
            self._others.setdefault(one, set()).add(other)
            self._others.setdefault(other, set()).add(one)

    def first(self) -> tuple[Place, ...]:
        """The first of them in the order of names; empty if there is none."""
        one = min((place for place, others in self._others.items() if others), default=None)
        return () if one is None else (one, min(self._others[one]))

    def number_with(self, place: Place, row: Row) -> int:
        """How many have this place, and the other one in the row."""
        return len(self._others.get(place, set()) & row.items())

    def number_in(self, row: Row) -> int:
        """Twice how many have both places in the row."""
        return sum(self.number_with(place, row) for place in row.items())

    def remove(self, row: Row) -> None:
        for place in row.items():
            self._others.get(place, set()).difference_update(row.items())


def _row(
    factors: Mapping[str, Collection[int]], first: Collection[Place], left: _Pairs, without: _Pairs, random: Random
) -> Row | None:
    """A row with the pair `first`, each further level of which adds most of what is left; None at a dead end."""
    row = dict(first)
    others = [name for name in sorted(factors) if name not in row]
    random.shuffle(others)
    for name in others:
        possible = [level for level in factors[name] if not without.number_with((name, level), row)]
        if not possible:
            return None
        random.shuffle(possible)
        row[name] = max(possible, key=lambda level: left.number_with((name, level), row))
    return row
