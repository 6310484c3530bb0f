"""Group knapsack: at most one option of each group, as much value as fits a number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """`width` GPUs bring `value`, of which taking none of a group's options brings 0."""

    width: int
    value: int


def pack(groups: Sequence[Sequence[Option]], capacity: int) -> list[int | None]:
    """Choose one option, or none, per group: the most value, with it the fewest GPUs.

    Returns the index of each group's option. Among equally good packings the one is chosen that gives a group its
    option rather than a later one: whoever comes first is preferred. O(groups x options x capacity).

    Source: TetriServe §4.2.2, Algorithm 1, lines 13-22.
    """
    best, tables = [0] * (capacity + 1), []
    for options in reversed(groups):
        after, choice = list(best), [-1] * (capacity + 1)
        for index, option in enumerate(options):
            for room in range(option.width, capacity + 1):
                value = best[room - option.width] + option.value
                if value > after[room] or (value == after[room] and choice[room] < 0 and option.value > 0):
                    after[room], choice[room] = value, index
        best = after
        tables.append(choice)
    room = best.index(max(best))
    return _read_back(groups, tables[::-1], room)


def _read_back(groups: Sequence[Sequence[Option]], tables: list[list[int]], room: int) -> list[int | None]:
    chosen: list[int | None] = []
    for options, choice in zip(groups, tables, strict=True):
        index = choice[room]
        chosen.append(None if index < 0 else index)
        room -= options[index].width if index >= 0 else 0
    return chosen
