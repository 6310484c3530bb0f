"""All reservations as of now, and the time that those before and after a place in their order leave of devices."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from tilework.admission.contract import Backlog, Moment, Reserves
from tilework.admission.effect_tree import EffectTree, Key
from tilework.admission.effects import run_alone, scale_of, step_back, time_of
from tilework.admission.reservation_timeline import DeviceTimes, Places, choose_group, nodes_within, placed
from tilework.core.block import Block
from tilework.core.policy import DeviceView
from tilework.core.time import NEVER_NS, START_MARGINS, Margin
from tilework.policy.toolkit.buddy_allocator import nodes


class ReservationBook:
    """Follows the reservations of a view, change by change.

    Reservations affect each other only where their groups may share devices: on the accelerators of one pool, or on all
    devices while CPU slots are up. So there is a tree for each pool, or one.

    `keys` are all reservations in order. `unplaced` are those that have, for the view, no group of devices that are up,
    or that lack a CPU slot while one is up. `blocks` rely on no components: another reservation may come before each.
    """

    def __init__(self) -> None:
        self.margins = START_MARGINS
        self.places = Places(())
        self.free_ns: DeviceTimes = {}
        self.keys: list[Key] = []
        self.blocks: dict[Key, Block] = {}
        self.unplaced: set[Key] = set()
        self._as_of: tuple[Sequence[DeviceView], Sequence[DeviceView], bool] | None = None
        self._number = 0
        self._moment: Moment | None = None
        self._begun: dict[Key, Block] = {}  # Reservations of jobs with works, as before these works.
        self._device_ids: tuple[int, ...] = ()
        self._tree_of: dict[int, EffectTree] = {}
        self._trees: list[EffectTree] = []
        self._to_place: set[Key] = set()
        self._around: tuple[Key, int, DeviceTimes, DeviceTimes] | None = None

    @property
    def num_visits(self) -> int:
        """Number of nodes of its trees that were visited, as a measure of the work that answers take."""
        return sum(tree.num_visits for tree in self._trees)

    # Following the view.

    def follow(self, view: Reserves) -> None:
        """Take over the margins, and the changes of the reservations and of the devices that are up."""
        as_of = self._as_of
        devices = view.devices
        slots = view.slots
        needs_loads = view.needs_loads
        if as_of is None or as_of[0] is not devices or as_of[1] is not slots or as_of[2] != needs_loads:
            self._begin(devices, slots, needs_loads)
        changes = view.reservation_changes(self._number)
        if changes.is_all and self.keys:
            self._begin(devices, slots, needs_loads)
        self._number = changes.number
        if self.margins != view.margins:
            self.margins = view.margins
            self._around = None
        for due_ns, job_id, block in changes.changes:
            key = due_ns, job_id
            self._begun.pop(key, None)
            if block is None:
                self._remove(key)
            else:
                self._put(key, block.if_unloaded if needs_loads else block)

    def _begin(self, devices: Sequence[DeviceView], slots: Sequence[DeviceView], needs_loads: bool) -> None:
        """Begin anew, without reservations, on these devices."""
        self._as_of = (devices, slots, needs_loads)
        self._number = -1
        self._moment = None
        self.places = of_pools, of_slots = Places(nodes(devices), [one.device_id for one in slots])
        self._device_ids = (*(one for node in of_pools for one in node), *of_slots)
        self._trees = [EffectTree() for _ in (of_pools if not slots else [()])]
        last = len(self._trees) - 1
        self._tree_of = {one: self._trees[min(at, last)] for at, node in enumerate(of_pools) for one in node}
        self._tree_of |= dict.fromkeys(of_slots, self._trees[0]) if slots else {}
        self.keys = []
        self.blocks = {}
        self._begun = {}
        self._around = None
        self.unplaced = set()
        self._to_place = set()

    def follow_devices(self, backlog: Backlog) -> None:
        """Follow the view, and also the times when devices are free and jobs ready, as admission needs them."""
        self.follow(backlog)
        moment = backlog.moment
        if self._moment == moment:
            return
        free_ns = {one.device_id: one.free_ns for one in (*backlog.devices, *backlog.slots)}
        if free_ns != self.free_ns:
            self.free_ns = free_ns
            self._around = None
        begun = {(due_ns, job_id): block for due_ns, job_id, block in backlog.begun_reservations()}
        needs_loads = backlog.needs_loads
        for key in self._begun.keys() - begun.keys():
            self._put(key, self._begun.pop(key))
        for key, block in begun.items():
            now = block.if_unloaded if needs_loads else block
            if self.blocks[key].ready_ns != now.ready_ns:
                self._begun.setdefault(key, self.blocks[key])
                self._put(key, now)
        self._place_all()
        self._moment = moment

    def _tree_for(self, block: Block) -> EffectTree | None:
        """Return the tree of a block; None if it has no group of devices of one pool that are up."""
        trees = {id(tree): tree for tree in (self._tree_of.get(one) for one, _, _ in block.windows())}
        return next(iter(trees.values())) if len(trees) == 1 else None

    def _put(self, key: Key, block: Block) -> None:
        former = self.blocks.get(key)
        if former == block and key not in self.unplaced:
            return
        if former is not None:
            self._moment = None  # Its job may have works. A job whose reservation is new has none.
        tree = self._tree_for(block)
        if former is None:
            insort(self.keys, key)
        elif (before := self._tree_for(former)) is not None and before is not tree:
            before.remove(key)
        self.blocks[key] = block
        self._keep_around(key, block, is_new=former is None)
        lacks_slot = block.demand.slot is not None and block.slot is None and bool(self.places.slots)
        if tree is None or lacks_slot:
            self.unplaced.add(key)
            if block.demand.run_ns and nodes_within(self.places.nodes, block.within):
                self._to_place.add(key)
        else:
            self.unplaced.discard(key)
            self._to_place.discard(key)
        if tree is not None:
            tree.put(key, block)

    def _remove(self, key: Key) -> None:
        if (block := self.blocks.pop(key, None)) is None:  # It was added and removed between two updates.
            return
        self._moment = None
        del self.keys[bisect_left(self.keys, key)]
        if (tree := self._tree_for(block)) is not None:
            tree.remove(key)
        self.unplaced.discard(key)
        self._to_place.discard(key)
        self._around = None

    def _place_all(self) -> None:
        """Give groups to the reservations that have none, in order, each where it can begin first.

        They usually have groups again before the next event (`admission.reservation_guard`).
        """
        for key in sorted(self._to_place):
            block = self.blocks[key]
            chosen = choose_group(self.before(key), self.places, block.demand, block.ready_ns, within=block.within)
            if chosen is not None:
                self._put(key, placed(block, chosen))
                self.unplaced.add(key)  # As before: the view does not have its group.
        self._to_place.clear()

    # Times that reservations leave on devices.

    def index(self, key: Key) -> int:
        """Return how many reservations come before this place."""
        return bisect_left(self.keys, key)

    def around(self, key: Key, now_ns: int) -> tuple[DeviceTimes, DeviceTimes]:
        """Return when devices are free after the reservations before this place, and until when later ones spare them.

        Later ones count by the margin of admission. The caller must not change the result. The answer for the latest
        place is kept, so the requests of one call, each placed after the one before, compute it once.
        """
        known = self._around
        margin = self.margins.admission
        if known is None or known[:2] != (key, now_ns):
            known = self._around = key, now_ns, self.before(key), self.spared_ns(key, margin, now_ns)
        return known[2:]

    def _keep_around(self, key: Key, block: Block, *, is_new: bool) -> None:
        """Follow a change in the answer for the latest place: include a new reservation just before it, or drop it."""
        known = self._around
        if known is None:
            return
        is_last_before = is_new and key < known[0] and self.keys[self.index(known[0]) - 1] == key
        if is_last_before and self._tree_for(block) is not None:
            run_alone(block, known[2])
        else:
            self._around = None

    def before(self, key: Key) -> DeviceTimes:
        """Return when devices are free after the reservations before this place."""
        free_ns = dict(self.free_ns)
        for tree in self._trees:
            tree.pass_before(key, free_ns)
        return free_ns

    def spared_ns(self, key: Key, margin: Margin, now_ns: int) -> DeviceTimes:
        """Return until when the reservations from this place on can spare each device."""
        times_ns = dict.fromkeys(self._device_ids, NEVER_NS)
        for tree in self._trees:
            marks = tree.bounds_from(key, margin)
            times_ns.update({one: time_of(mark, margin, now_ns) for one, mark in marks.items()})
        return times_ns

    def latest_end_ns(self, key: Key, margin: Margin, now_ns: int) -> int:
        """Return when this reservation must have ended, so that it and all later ones are in time."""
        block = self.blocks[key]
        tree = self._tree_for(block) if block.demand.run_ns else None
        marks = {} if tree is None else tree.bounds_from((key[0], key[1] + 1), margin)
        end = 1000 * block.due_ns if tree is None else step_back(block, marks, scale_of(margin))
        return time_of(end, margin, now_ns)
