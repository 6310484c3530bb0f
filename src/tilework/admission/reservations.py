"""Reservations, by which the server knows that every deadline that it has promised can still be met.

Theory of operation. A request with `on_miss: reject` is accepted only if its deadline can be promised. Its remaining
work then has a *reservation*: a block of device x time with a deadline, and with the devices on which it is to run. The
first device of its group is taken from start to end, the others only from the first steps to the last, and a CPU slot
for the stages that run on one (`core.block.Demand`).

*The schedule.* Each device runs its reservations in the order of their deadlines. A reservation begins when its job is
ready, that is, when its running works have ended, and when each device is free of earlier reservations by the time that
the block takes it. If all reservations end by their deadlines in this schedule, all promises can be kept, whatever else
waits: run the promised jobs by the schedule, and everything else when there is room. So groups that pass this test are
a *feasibility proof*.

*Why groups are kept.* The end of a block is a maximum of sums: the time at which a device is free, or a job ready, plus
the blocks in between. So earlier times never break a proof: if a device is free earlier, or a job is ready earlier, has
less work left, or is gone, no block ends later. And a delay of devices and jobs delays no block by more than itself.
Placing all blocks anew at each event, each where it can begin first, has no such property (Graham's scheduling
anomalies): on several nodes, with wide blocks, or where some jobs are ready later, a device that is free early can make
a promise late.

*The test.* Going backwards from the deadlines gives for each device the time until which the reservations can spare it,
and for each block the time by which it must have ended (`reservation_timeline.latest_ends`). All are in time exactly if
each device is free by then, and each job is ready early enough. So most questions take one comparison per device, at a
place in the order that is found in the logarithm of the number of reservations (`admission.reservation_book`).

What preserves the proof:

- admission accepts a promise only with a group for it that leaves a proof: beside the others (`Reservations.place`), or
  with all groups chosen anew, all widths, too, or works stopped (`admission.promise_query`);
- the guard (`admission.reservation_guard`) drops starts and stops of a policy that leave no proof: neither with the
  present groups, nor with a started job's reservation moved to the group on which it was started, nor with all groups
  or widths chosen anew;
- the guard starts a reservation on its group when it cannot wait any longer;
- when a reservation is in danger or its group has lost a device, the guard chooses groups anew or widens blocks, if
  that helps.

So every policy keeps promises, also a policy that ignores deadlines.

*Margins.* A block must end earlier than its deadline by a fixed time and a share of the time until then. That covers
the gaps between works, and works that take longer than predicted, as far as they lately did (`admission.margins`). The
margin of admission is twice the guard's, so the guard starts with some time to spare.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.admission.effect_tree import Key
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservation_timeline import Chosen, Places, begin_ns, choose_group
from tilework.core.block import Block, Demand
from tilework.core.pools import Within
from tilework.core.time import Margin

_FEW_PLACES, _MOST_PLACES = 16, 24


@dataclass(slots=True)
class SearchBudget:
    """Limits of the search for promises, for one call with one or more requests.

    `num_places` is the number of further places in the order of reservations that are tried to find earliest deadlines;
    if none is left, only the place after all others is tried. `may_stop`: works of other jobs may be stopped for it.
    `is_restored`: the request was accepted before, so its remaining work needs no more than the guard keeps, at any
    price.
    """

    num_places: int = _MOST_PLACES
    may_stop: bool = False
    is_restored: bool = False


@dataclass(slots=True)
class Reservations:
    """Queries about one more reservation, beside those of the book, at one time.

    It takes none of the devices that are `silent`. At least one device that serves it is up, and not silent.
    """

    book: ReservationBook
    now_ns: int
    budget: SearchBudget = field(default_factory=SearchBudget)
    silent: frozenset[int] = frozenset()

    @property
    def places(self) -> Places:
        """Devices that it may take."""
        return self.book.places.without(self.silent)

    @property
    def margin(self) -> Margin:
        """Time by which it must end before its deadline."""
        margins = self.book.margins
        return margins.guard if self.budget.is_restored else margins.admission

    def place(self, due_ns: int, demand: Demand, within: Within = None) -> Block | None:
        """Return the reservation of a new request with this deadline, on devices `within`.

        None if it or another one would be late on every group. Other reservations keep their groups.
        """
        found = self._beside_others(_after(due_ns), demand, within)
        if found is None or self.margin.due_ns(found[1], self.now_ns) > due_ns:
            return None
        return Block(due_ns, 0, demand, *found[0], within=within)

    def looser_places(self, after_ns: int, before_ns: int) -> list[int]:
        """Return the latest deadline of each place in the order that ends between these times, ascending."""
        keys = self.book.keys
        first, last = self.book.index(_after(after_ns)), self.book.index(_after(before_ns))
        ends_ns = dict.fromkeys(due_ns - 1 for due_ns, _ in keys[first:last])
        return [end_ns for end_ns in ends_ns if after_ns < end_ns < before_ns]

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0, within: Within = None) -> int:
        """Return a deadline, from `at_least_ns` on, with which a new request would be accepted on devices `within`.

        If few reservations are due later, it is the earliest deadline for which all others keep their groups. Of many,
        some places in their order are tried: repeatedly the middle between a place without room and the next one with
        room. So the result may be later than the earliest; each place that is tried reduces the possible error.
        """
        first, last = self.book.index(_after(at_least_ns)), len(self.book.keys)
        found_ns = None
        if last - first <= min(_FEW_PLACES, self.budget.num_places):
            tried = (self._due_ns(index, demand, at_least_ns, within) for index in range(first, last))
            found_ns = next((due_ns for due_ns in tried if due_ns is not None), None)
            first = last
        elif self.budget.num_places > 0:
            found_ns = self._due_ns(first, demand, at_least_ns, within)
        if found_ns is not None:
            return found_ns
        found_ns = self._due_ns(last, demand, at_least_ns, within)
        assert found_ns is not None, "there is room after all others"
        while last - first > 1 and self.budget.num_places > 0:
            middle = (first + last) // 2
            due_ns = self._due_ns(middle, demand, at_least_ns, within)
            if due_ns is None:
                first = middle
            else:
                last = middle
                found_ns = due_ns
        return found_ns

    def _due_ns(self, index: int, demand: Demand, at_least_ns: int, within: Within) -> int | None:
        """Return the earliest deadline that gives a new request this place in the order; None if there is no room."""
        keys = self.book.keys
        self.budget.num_places -= 1
        before_ns = keys[index - 1][0] if index else 0
        if index < len(keys) and keys[index][0] <= max(before_ns, at_least_ns):
            return None
        found = self._beside_others(_after(before_ns), demand, within)
        if found is None:
            return None
        due_ns = max(at_least_ns, before_ns, self.margin.due_ns(found[1], self.now_ns))
        return due_ns if index == len(keys) or due_ns < keys[index][0] else None

    def _beside_others(self, place: Key, demand: Demand, within: Within) -> tuple[Chosen, int] | None:
        """Return a group for a new block at a place in the order that later blocks can spare, and its end there."""
        free_ns, spared_ns = self.book.around(place, self.now_ns)
        chosen = choose_group(free_ns, self.places, demand, self.now_ns, spared_ns, within)
        if chosen is None:
            return None
        return chosen, begin_ns(Block(0, self.now_ns, demand, *chosen), free_ns) + demand.run_ns


def _after(due_ns: int) -> Key:
    """Return the place of a new reservation in the order: after those with the same deadline."""
    return due_ns + 1, -1
