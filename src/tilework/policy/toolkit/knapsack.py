"""Multiple-choice knapsack: at most one option of each group, with the most value that fits a number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_CELLS = 1 << 13


@dataclass(frozen=True, slots=True)
class Option:
    """`width` devices bring `value`; none of a group's options brings 0."""

    width: int
    value: int


def solve_knapsack(groups: Sequence[Sequence[Option]], capacity: int) -> list[int | None]:
    """Choose one option, or none, per group: the most value, with it the fewest devices.

    Returns the index of each group's option. Of equally good choices, an earlier group is given an option rather
    than a later one. O(groups x options x capacity).

    Source: TetriServe §4.2.2, Algorithm 1, lines 13-22.
    """
    best = [0] * (capacity + 1)
    tables = []
    for options in reversed(groups):
        after = list(best)
        choice = [-1] * (capacity + 1)
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


def solve_knapsack_quickly(groups: Sequence[Sequence[Option]], capacity: int) -> list[int | None]:
    """Choose as `solve_knapsack` where its table is small; else in O(options x log options), not always the most value.

    Each group moves from nothing to ever wider options, those with the most value per device first, as far as they fit.
    That is the optimum without whole numbers, but for the one move that would be made in part: if each option fits
    alone, less is lost than one is worth. Remaining devices go to the groups that gain most by them. Groups that are
    one object are looked at once.

    Source: the greedy method for the multiple-choice knapsack problem (Kellerer, Pferschy, Pisinger 2004, chapter 11).
    """
    if len(groups) * capacity <= _MOST_CELLS:
        return solve_knapsack(groups, capacity)
    hulls: dict[int, list[tuple[float, int, int]]] = {}
    moves = []
    for group, options in enumerate(groups):
        hull = hulls.get(id(options))
        if hull is None:
            hull = hulls[id(options)] = _hull(options)
        for level, (order, width, option) in enumerate(hull):
            moves.append((order, group, level, width, option))
    moves.sort()
    chosen: list[int | None] = [None] * len(groups)
    levels = [0] * len(groups)
    room = capacity
    for _, group, level, width, option in moves:
        if width <= room and levels[group] == level:
            levels[group] = level + 1
            chosen[group] = option
            room -= width
    return _fill(groups, chosen, room) if room else chosen


def _hull(options: Sequence[Option]) -> list[tuple[float, int, int]]:
    """Return the moves along the upper convex hull, from nothing on.

    Of each: minus the value that it gains per device, for sorting; the devices that it adds; the index of its option.
    """
    if len(options) == 1:
        (option,) = options
        return [(-option.value / option.width, option.width, 0)] if option.value > 0 else []
    moves: list[tuple[int, int, int]] = []
    value = width = 0
    for index in sorted(range(len(options)), key=lambda index: (options[index].width, -options[index].value)):
        gain, added = options[index].value - value, options[index].width - width
        if gain <= 0 or not added:
            continue
        value, width = value + gain, width + added
        while moves and gain * moves[-1][1] >= moves[-1][0] * added:  # It is better to skip the one before.
            former = moves.pop()
            gain, added = gain + former[0], added + former[1]
        moves.append((gain, added, index))
    return [(-gain / added, added, index) for gain, added, index in moves]


def _fill(groups: Sequence[Sequence[Option]], chosen: list[int | None], room: int) -> list[int | None]:
    """Change options, each group's once, those that gain most first, until nothing fits `room` more devices."""
    changes = []
    for group, options in enumerate(groups):
        now = chosen[group]
        value, width = (0, 0) if now is None else (options[now].value, options[now].width)
        changes += [
            (value - option.value, option.width - width, group, index)
            for index, option in enumerate(options)
            if option.value > value and option.width - width <= room
        ]
    filled: dict[int, int] = {}
    for _, added, group, index in sorted(changes):
        if added <= room and group not in filled:
            filled[group] = index
            room -= added
    return [filled.get(group, index) for group, index in enumerate(chosen)]
