"""Effects of sequences of reservations on the times of devices, whatever these times are.

Theory of operation. A block begins when each of its devices is free, so the time at which a device is free after a
sequence of blocks is a maximum of sums: over devices, the time when each was free before, plus a delay that depends
only on the blocks. These delays are a matrix in max-plus algebra (Baccelli et al., Synchronization and Linearity,
1992), and the matrix of two sequences, one after the other, is the product of theirs. The same matrix leads backwards:
a device must be free before the sequence by the least, over devices, of the time when each must be free after it minus
the delay, and early enough for the deadlines of the sequence itself (residuation). So a long sequence is passed at
once, in both directions, and one block can change without a look at the others (`admission.effect_tree`).

*Time.* A margin is a share of the time until the deadline, so what is in time changes as time passes. But all latest
ends of a margin move together: `Margin.latest_ns` is `(1000 due + permille now - 1000 fixed) // (1000 + permille)`.
So deadlines are kept as *marks*: these dividends without the terms of now and of the fixed part. In marks a nanosecond
is `1000 + permille` units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilework.admission.reservation_timeline import DeviceTimes, begin_ns
from tilework.core.block import Block
from tilework.core.time import Margin

NEVER = 1 << 100
"""Mark beyond all others."""
Row = Mapping[int, int]
"""Delays from devices before a sequence to one device after it; a device that is missing does not delay it."""
Marks = dict[int, int]
"""Marks by which devices must be free; a device that is missing need never be."""


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays of a sequence, for the devices that it takes.

    `ready_ns` are times until which devices are taken at least, by blocks that wait for their jobs. Devices with the
    same row share the object.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    ready_ns: Mapping[int, int] = field(default_factory=dict)

    def then(self, after: Delays) -> Delays:
        """Return the delays of this sequence and another one after it."""
        rows = dict(self.rows)
        ready_ns = dict(self.ready_ns)
        known: dict[int, Row] = {}
        for device_id, row in after.rows.items():
            made = known.get(id(row))
            if made is None:
                made = known[id(row)] = _through(self.rows, row)
            rows[device_id] = made
        if self.ready_ns or after.ready_ns:
            for device_id, row in after.rows.items():
                readies = [self.ready_ns[one] + delay_ns for one, delay_ns in row.items() if one in self.ready_ns]
                if readies or device_id in after.ready_ns:
                    ready_ns[device_id] = max([after.ready_ns.get(device_id, 0), *readies])
        return Delays(rows, ready_ns)

    def apply(self, free_ns: DeviceTimes) -> None:
        """Advance the times at which devices are free to those after the sequence."""
        found: dict[int, int] = {}
        for row in self.rows.values():
            if id(row) not in found:
                found[id(row)] = max([free_ns[one] + delay_ns for one, delay_ns in row.items()])
        free_ns.update({device_id: found[id(row)] for device_id, row in self.rows.items()})
        for device_id, at_ns in self.ready_ns.items():
            free_ns[device_id] = max(free_ns[device_id], at_ns)


def _through(before: Mapping[int, Row], row: Row) -> Row:
    """Return the delays that lead to `row` by way of `before`."""
    made: dict[int, int] = {}
    for one, delay_ns in row.items():
        for device_id, first_ns in before[one].items() if one in before else ((one, 0),):
            whole_ns = first_ns + delay_ns
            if made.get(device_id, whole_ns) <= whole_ns:
                made[device_id] = whole_ns
    return made


def delays_of(blocks: Sequence[Block]) -> Delays:
    """Return the delays of these blocks, one after another."""
    rows: dict[int, Row] = {}
    ready_ns: dict[int, int] = {}
    for block in blocks:
        run_ns = block.demand.run_ns
        if not run_ns or not block.devices:
            continue
        if len(block.devices) == 1 and block.slot is None:
            device_id = block.devices[0]
            row = rows.get(device_id)
            rows[device_id] = {one: ns + run_ns for one, ns in row.items()} if row else {device_id: run_ns}
            windows = [(device_id, 0, run_ns)]
        else:
            windows = list(block.windows())
            start: dict[int, int] = {}
            for device_id, from_ns, _ in windows:
                for one, delay_ns in rows.get(device_id, {device_id: 0}).items():
                    start[one] = max(start.get(one, delay_ns - from_ns), delay_ns - from_ns)
            ends = {until_ns: {one: ns + until_ns for one, ns in start.items()} for _, _, until_ns in windows}
            for device_id, _, until_ns in windows:
                rows[device_id] = ends[until_ns]
        if block.ready_ns or not ready_ns.keys().isdisjoint(device_id for device_id, _, _ in windows):
            readies = [ready_ns[one] - from_ns for one, from_ns, _ in windows if one in ready_ns]
            start_ns = max([block.ready_ns, *readies])
            for device_id, _, until_ns in windows:
                ready_ns[device_id] = start_ns + until_ns
    return Delays(rows, ready_ns)


def bounds_of(blocks: Sequence[Block], scale: int) -> Marks:
    """Return the marks by which the devices of these blocks must be free, if no other block comes after them."""
    marks: Marks = {}
    for block in reversed(blocks):
        step_back(block, marks, scale)
    return marks


def bounds_through(delays: Delays, later: Mapping[int, int], scale: int) -> Marks:
    """Return the marks by which devices must be free before a sequence with these delays, for bounds after it."""
    marks: Marks = {}
    for device_id, mark in later.items():
        for one, delay_ns in delays.rows.get(device_id, {device_id: 0}).items():
            bound = mark - scale * delay_ns
            if bound < marks.get(one, NEVER):
                marks[one] = bound
    return marks


def lower(marks: Marks, bounds: Mapping[int, int]) -> None:
    """Lower marks to these bounds."""
    for device_id, mark in bounds.items():
        if mark < marks.get(device_id, NEVER):
            marks[device_id] = mark


def run_alone(block: Block, free_ns: DeviceTimes) -> None:
    """Advance the times at which devices are free to those after a block that has devices, or takes no time."""
    run_ns = block.demand.run_ns
    if run_ns and len(block.devices) == 1 and block.slot is None:
        free_ns[block.devices[0]] = max(free_ns[block.devices[0]], block.ready_ns) + run_ns
    elif run_ns:
        start_ns = begin_ns(block, free_ns)
        for device_id, _, until_ns in block.windows():
            free_ns[device_id] = start_ns + until_ns


def step_back(block: Block, marks: Marks, scale: int) -> int:
    """Lower the marks of a block's devices to those before it; returns the mark by which the block must have ended."""
    end = 1000 * block.due_ns
    run_ns = block.demand.run_ns
    if not run_ns or not block.devices:
        return end
    if len(block.devices) == 1 and block.slot is None:
        device_id = block.devices[0]
        end = min(end, marks.get(device_id, NEVER))
        marks[device_id] = end - scale * run_ns
        return end
    windows = list(block.windows())
    end = min([end, *(marks.get(one, NEVER) + scale * (run_ns - until_ns) for one, _, until_ns in windows)])
    for device_id, from_ns, _ in windows:
        marks[device_id] = end - scale * (run_ns - from_ns)
    return end


def scale_of(margin: Margin) -> int:
    """Return the number of units in which a margin's marks count a nanosecond."""
    return 1000 + margin.permille


def time_of(mark: int, margin: Margin, now_ns: int) -> int:
    """Return the time that a mark stands for now."""
    return (mark + margin.permille * now_ns - 1000 * margin.fixed_ns) // (1000 + margin.permille)
