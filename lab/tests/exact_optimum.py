"""How many requests can be on time, exactly: for a handful of requests on a few devices.

An integer program over slots of time. A slot is the greatest common divisor of all durations and of the times between
arrivals, which loses nothing: in a schedule in which every unit is moved as early as it can be, every unit of work
begins at an arrival, or when another one ends. For each unit of a piece (a step, the encode, the decode), each degree,
node and slot there is a
variable: one begins there. Units of a piece are alike, so they need no variables of their own.

Assumptions: works last as long as the cost table says; steps run through, but between two of them a request may pause,
change its degree and go elsewhere at no cost; a group is any set of devices of one node; a work is of one request;
encode and decode run on one device. Requests without a deadline are left out: they can wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from tilework.core.request import Request
from tilework.cost.demand import Speed
from tilework.cost.table_costs import TableCosts
from tilework_lab.optimum.bound import Due, due_requests
from tilework_lab.optimum.solver import Builder, Floats, Ints, solve_whole

_MOST_VARIABLES = 50_000


class TooLarge(ValueError):
    """The exact program would take too long; the message says what would make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One step, encode or decode of an optimal schedule."""

    uid: str
    stage: str
    degree: int
    node: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The requests that are on time in one optimal schedule, and that schedule in order of starts."""

    on_time: frozenset[str]
    schedule: tuple[Placed, ...]


def exact_optimum(
    requests: Sequence[Request], costs: TableCosts, *, num_devices: int, devices_per_node: int = 8
) -> Optimum:
    """The most requests that can be on time.

    Raises:
        TooLarge: there are too many requests, steps or slots.
        UnknownCost: the costs say nothing of a pipeline, or of no degree that a node can run.
    """
    all_due = due_requests(requests, costs, min(num_devices, devices_per_node))
    all_due = [due for due in all_due if due.slack_ns >= 0]
    if not all_due:
        return Optimum(on_time=frozenset(), schedule=())
    nodes = [min(devices_per_node, num_devices - first) for first in range(0, num_devices, devices_per_node)]
    return _Slots(all_due, nodes).solve()


@dataclass(frozen=True, slots=True)
class _Starts:
    """The variables of one request's piece at one degree on one node: column i is a start in slot `slots[i]`."""

    due: Due
    stage: str
    speed: Speed
    node: int
    columns: Ints
    slots: Ints
    length: int

    def running(self) -> Iterator[tuple[Ints, Ints]]:
        """(slots, columns): each start with each slot that it occupies."""
        for offset in range(self.length):
            yield self.slots + offset, self.columns


class _Slots:
    """The program."""

    def __init__(self, all_due: Sequence[Due], nodes: Sequence[int]) -> None:
        """`nodes` are the numbers of devices of each."""
        self._all_due, self._nodes = all_due, nodes
        self._origin_ns = min(due.arrival_ns for due in all_due)
        self._slot_ns = self._find_slot_ns()
        self._num_slots = self._slot_of(max(due.deadline_ns for due in all_due)) + 1
        self._check_size()
        self._builder = Builder()
        self._rooms = [self._builder.add_rows(np.full(self._num_slots, float(size))) for size in nodes]
        self._chosen = self._builder.add_columns(np.ones(len(all_due)), 1.0)
        self._starts: list[_Starts] = []
        for due, column in zip(all_due, self._chosen, strict=True):
            self._add(due, column)

    def _find_slot_ns(self) -> int:
        lengths = {due.arrival_ns - self._origin_ns for due in self._all_due}
        lengths |= {speed.step_ns for due in self._all_due for piece in due.pieces for speed in piece.speeds}
        return gcd(*lengths)

    def _slot_of(self, at_ns: int) -> int:
        return (at_ns - self._origin_ns) // self._slot_ns

    def _check_size(self) -> None:
        per_slot = sum(len(piece.speeds) for due in self._all_due for piece in due.pieces) * len(self._nodes)
        size = per_slot * self._num_slots
        if size > _MOST_VARIABLES:
            raise TooLarge(
                f"the exact program would have {size:,} variables, and {_MOST_VARIABLES:,} are allowed; take fewer "
                f"requests, or round durations and arrivals so that they have a divisor above {self._slot_ns} ns"
            )

    def _add(self, due: Due, chosen: int) -> None:
        alone = self._builder.add_rows(np.zeros(self._num_slots))
        self._builder.put(alone, chosen, -1.0)
        before: tuple[int, list[_Starts]] | None = None
        for piece, start_ns, end_ns in due.windows():
            here = []
            for speed in piece.speeds:
                for node, size in enumerate(self._nodes):
                    if speed.degree <= size:
                        here.append(self._add_starts(due, piece.stage, speed, node, start_ns, end_ns))
            for starts in here:
                for slots, columns in starts.running():
                    self._builder.put(alone[slots], columns, 1.0)
                    self._builder.put(self._rooms[starts.node][slots], columns, float(starts.speed.degree))
            self._demand(piece.units, here, chosen)
            if before is not None:
                self._order(*before, here)
            before = piece.units, here
            self._starts += here

    def _add_starts(self, due: Due, stage: str, speed: Speed, node: int, start_ns: int, end_ns: int) -> _Starts:
        length = speed.step_ns // self._slot_ns
        slots = np.arange(self._slot_of(start_ns), self._slot_of(end_ns) - length + 1)
        columns = self._builder.add_columns(np.ones(len(slots)))
        return _Starts(due, stage, speed, node, columns, slots, length)

    def _demand(self, units: int, here: Sequence[_Starts], chosen: int) -> None:
        """As many starts as units if the request is chosen, and none if it is not."""
        for sign in (1.0, -1.0):
            row = self._builder.add_row()
            self._builder.put(row, chosen, sign * units)
            for starts in here:
                self._builder.put(row, starts.columns, -sign)

    def _order(self, units: int, before: Sequence[_Starts], here: Sequence[_Starts]) -> None:
        """Nothing of a piece begins in a slot by which not all units of the piece before it have ended."""
        slots = np.unique(np.concatenate([starts.slots for starts in here]))
        for slot, row in zip(slots, self._builder.add_rows(np.zeros(len(slots))), strict=True):
            for starts in here:
                self._builder.put(row, starts.columns[starts.slots == slot], float(units))
            for starts in before:
                self._builder.put(row, starts.columns[starts.slots + starts.length <= slot], -1.0)

    def solve(self) -> Optimum:
        point = solve_whole(self._builder.program(), np.arange(self._builder.num_columns)).point
        chosen = zip(self._all_due, point[self._chosen], strict=True)
        placed = [one for starts in self._starts for one in self._placed(starts, point)]
        return Optimum(
            on_time=frozenset(due.request.uid for due, value in chosen if value > 0.5),
            schedule=tuple(sorted(placed, key=lambda one: (one.start_ns, one.uid))),
        )

    def _placed(self, starts: _Starts, point: Floats) -> Iterator[Placed]:
        for slot in starts.slots[point[starts.columns] > 0.5].tolist():
            start_ns = self._origin_ns + slot * self._slot_ns
            yield Placed(
                uid=starts.due.request.uid,
                stage=starts.stage,
                degree=starts.speed.degree,
                node=starts.node,
                start_ns=start_ns,
                end_ns=start_ns + starts.speed.step_ns,
            )
