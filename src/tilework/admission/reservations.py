"""Reservations: how the server knows that every deadline that it has promised can still be met.

Theory of operation. A request with `on_miss: reject` is accepted only if its deadline can be promised. Its remaining
work then has a *reservation*: a block of device x time with a deadline, and with the devices on which it is to run. The
first device of its group is taken from begin to end, the others only from the first steps to the last, and a CPU slot
for the stages that run on one (`core.interfaces.Demand`).

*The schedule.* Each device runs its reservations in the order of their deadlines. A reservation begins when its job is
ready, that is, when the works that are running have ended, and early enough for no device to be free too late: each
device must be free of earlier reservations by the time that the block takes it. If all reservations end by their
deadlines in this schedule, all promises can be kept, whatever else waits: run the promised jobs by the schedule, and
everything else when there is room. So groups that pass this test are a *feasibility proof*.

*Why groups are kept.* The end of a block is a maximum of sums: the time at which a device is free, or a job ready, plus
the blocks in between. So earlier times never break a proof: if a device is free earlier, or a job is ready earlier, has
less work left, or is gone, no block ends later. And a delay of devices and jobs delays no block by more than itself.
Placing all blocks anew at each event, each where it can begin first, has no such property (Graham's scheduling
anomalies): on several nodes, with wide blocks, or where some jobs are ready later, a device that is free early can make
a promise late.

*The test.* Going backwards from the deadlines gives for each device until when the reservations can spare it, and for
each block when it must have ended (`reservation_timeline.latest_ends`). All are in time exactly if each device is free
by then, and each job is ready early enough. So most questions take one comparison per device.

What preserves the proof:

- admission accepts a promise only with a group for it that leaves a proof (`Reservations.place`);
- the guard (`admission.reservation_guard`) drops starts of a policy that leave no proof: neither with the present
  groups, nor with a started job's reservation moved to the group on which it was started, nor with all groups chosen
  anew;
- the guard starts a reservation on its group when it cannot wait any longer;
- when a reservation is in danger or its group has lost a device, the guard chooses groups anew or widens blocks, if
  that helps.

So every policy keeps promises, also a policy that ignores deadlines.

*Margins.* A block must end earlier than its deadline by a fixed time and a share of the time until then
(`policy.toolkit.margin`). That covers the gaps between works, and works that take longer than predicted. The margin of
admission is the larger one, so the guard starts with some time to spare.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilework.admission.reservation_timeline import (
    Chosen,
    DeviceTimes,
    Nodes,
    begin_ns,
    choose_group,
    latest_ends,
    run_in_order,
)
from tilework.core.interfaces import Block, Demand
from tilework.core.pools import Within
from tilework.core.time import NEVER_NS
from tilework.policy.toolkit.margin import ADMISSION_MARGIN

_MANY, _STRIDE = 256, 32


class Reservations:
    """The reservations of all promised jobs, in order of their deadlines, on the devices at one time.

    `free_ns` is when each device is free; there is at least one device. The effects of the blocks before and after a
    place in the order are computed when they are first needed, and cached at every `_STRIDE`-th place. So most answers
    take far less time than going through all blocks.
    """

    def __init__(self, free_ns: DeviceTimes, nodes: Nodes, blocks: Sequence[Block], now_ns: int) -> None:
        self.free_ns = free_ns
        self.nodes = nodes
        self.blocks = blocks
        self.now_ns = now_ns
        self._stride = 1 if len(blocks) <= _MANY else _STRIDE
        self._free_ns = [free_ns]
        self._spared_ns = [dict.fromkeys(free_ns, NEVER_NS)]

    def set_time(self, now_ns: int) -> None:
        """Move to a later time with the same free times and blocks; margins are smaller then."""
        self.now_ns = now_ns

    def place(self, due_ns: int, demand: Demand, within: Within = None) -> Block | None:
        """The reservation of a new request with this deadline, on devices `within`.

        None if it or another would be late on every group.

        Other reservations keep their groups. If there is no room and there are few reservations, all groups are chosen
        anew; if that makes room, the guard will choose them anew, too.
        """
        index = self._place_of(due_ns)
        found = self._beside_others(index, demand, within)
        if found is not None and ADMISSION_MARGIN.due_ns(found[1], self.now_ns) <= due_ns:
            return Block(due_ns, 0, demand, *found[0], within=within)
        if len(self.blocks) > _MANY:
            return None
        return self._anew(index, Block(due_ns, self.now_ns, demand, within=within))

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0, within: Within = None) -> int:
        """A deadline, from `at_least_ns` on, with which a new request would be accepted on devices `within`.

        It is the earliest for which all other reservations keep their groups. With many reservations it may be later,
        since not all places in the order are tried.
        """
        for index in self._places(self._place_of(at_least_ns)):
            found = self._beside_others(index, demand, within)
            if found is not None:
                before_ns = self.blocks[index - 1].due_ns if index else 0
                due_ns = max(at_least_ns, before_ns, ADMISSION_MARGIN.due_ns(found[1], self.now_ns))
                if index == len(self.blocks) or due_ns < self.blocks[index].due_ns:
                    return due_ns
        raise AssertionError("there is room after all others")

    def _beside_others(self, index: int, demand: Demand, within: Within) -> tuple[Chosen, int] | None:
        """A group for a new block at a place in the order that later blocks can spare, and the block's end on it."""
        free_ns, spared_ns = self._around(index)
        chosen = choose_group(free_ns, self.nodes, demand, self.now_ns, spared_ns, within)
        if chosen is None:
            return None
        return chosen, begin_ns(Block(0, self.now_ns, demand, *chosen), free_ns) + demand.run_ns

    def _anew(self, index: int, newcomer: Block) -> Block | None:
        blocks = [*self.blocks[:index], newcomer, *self.blocks[index:]]
        blocks, ends_ns = run_in_order(dict(self.free_ns), self.nodes, blocks, anew=True)
        for block, end_ns in zip(blocks, ends_ns, strict=True):
            if ADMISSION_MARGIN.due_ns(end_ns, self.now_ns) > block.due_ns:
                return None
        return replace(blocks[index], ready_ns=0)

    def _place_of(self, due_ns: int) -> int:
        """The place of a new block in the order: after blocks with the same deadline."""
        return bisect_left(self.blocks, due_ns + 1, key=_due_ns)

    def _places(self, first: int) -> Iterator[int]:
        """Places in the order from `first` on: all of them, or `first`, the cached places and the last."""
        yield first
        yield from range(first // self._stride * self._stride + self._stride, len(self.blocks), self._stride)
        if first < len(self.blocks):
            yield len(self.blocks)

    def _around(self, index: int) -> tuple[DeviceTimes, DeviceTimes]:
        """When devices are free after the blocks before a place, and until when later blocks can spare them.

        The caller must not change them.
        """
        stride, mark, next_mark = self._stride, index // self._stride, -(-index // self._stride)
        free_ns, spared_ns = self._free_at(mark), self._spared_at(next_mark)
        if mark < next_mark:
            free_ns, spared_ns = dict(free_ns), dict(spared_ns)
            run_in_order(free_ns, self.nodes, self.blocks[mark * stride : index])
            self._go_back(spared_ns, index, next_mark * stride)
        return free_ns, spared_ns

    def _free_at(self, mark: int) -> DeviceTimes:
        marks, stride = self._free_ns, self._stride
        while len(marks) <= mark:
            free_ns, first = dict(marks[-1]), (len(marks) - 1) * stride
            run_in_order(free_ns, self.nodes, self.blocks[first : first + stride])
            marks.append(free_ns)
        return marks[mark]

    def _spared_at(self, mark: int) -> DeviceTimes:
        marks, stride = self._spared_ns, self._stride  # The last mark comes first.
        last = -(-len(self.blocks) // stride)
        while last - len(marks) >= mark:
            spared_ns, first = dict(marks[-1]), (last - len(marks)) * stride
            self._go_back(spared_ns, first, first + stride)
            marks.append(spared_ns)
        return marks[last - mark]

    def _go_back(self, spared_ns: DeviceTimes, first: int, last: int) -> None:
        blocks = self.blocks[first:last]
        latest_ends(spared_ns, blocks, ADMISSION_MARGIN.latest_all_ns(blocks, self.now_ns))


def _due_ns(block: Block) -> int:
    return block.due_ns
