"""A view that has reservations, devices and nothing else, for tests of the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tilework.admission.contract import Moment, ReservationChange, ReservationChanges
from tilework.admission.effect_tree import Key
from tilework.core.block import Block
from tilework.core.time import START_MARGINS


class View:
    """Devices of `nodes`, the others are CPU slots, with these reservations; all may be changed."""

    def __init__(
        self, free_ns: Mapping[int, int], nodes: Sequence[Sequence[int]], blocks: Sequence[Block] = ()
    ) -> None:
        self.needs_loads, self.margins = False, START_MARGINS
        self.blocks: dict[Key, Block] = {}
        self.ready_ns: dict[Key, int] = {}
        self._changes: list[ReservationChange] = []
        self._num_moments = 0
        self.join(free_ns, nodes)
        for number, block in enumerate(blocks):
            self.put((block.due_ns, number), block)

    def join(self, free_ns: Mapping[int, int], nodes: Sequence[Sequence[int]]) -> None:
        """Have these devices from now on."""
        self._free_ns, self._pool_of = dict(free_ns), {one: at for at, node in enumerate(nodes) for one in node}
        self.devices: Any = tuple(self._device(one) for node in nodes for one in node)
        self.slots: Any = tuple(self._device(one) for one in free_ns if one not in self._pool_of)
        self._num_moments += 1

    def _device(self, device_id: int) -> Any:
        free_ns = self._free_ns[device_id]
        return SimpleNamespace(device_id=device_id, pool=self._pool_of.get(device_id), free_ns=free_ns)

    def be_free(self, device_id: int, at_ns: int) -> None:
        """Let a device be free at another time."""
        self._free_ns[device_id] = at_ns
        for device in (*self.devices, *self.slots):
            device.free_ns = self._free_ns[device.device_id]
        self._num_moments += 1

    def put(self, key: Key, block: Block) -> None:
        """Add or replace a reservation. One that is ready later is of a job that has works."""
        self.ready_ns.pop(key, None)
        if block.ready_ns:
            self.ready_ns[key] = block.ready_ns
            self._num_moments += 1
        self.blocks[key] = replace(block, ready_ns=0)
        self._changes.append(ReservationChange(*key, self.blocks[key]))

    def end(self, key: Key) -> None:
        self._num_moments += self.ready_ns.pop(key, None) is not None
        del self.blocks[key]
        self._changes.append(ReservationChange(*key, None))

    @property
    def moment(self) -> Moment:
        return Moment(self._num_moments, 0, None)

    def reserved(self, most: int | None = None) -> list[Block]:
        every = [replace(block, ready_ns=self.ready_ns.get(key, 0)) for key, block in sorted(self.blocks.items())]
        return every[:most]

    def begun_reservations(self) -> list[tuple[int, int, Block]]:
        return [(*key, replace(self.blocks[key], ready_ns=ns)) for key, ns in self.ready_ns.items()]

    def reservation_changes(self, since: int) -> ReservationChanges:
        if since >= 0:
            return ReservationChanges(len(self._changes), self._changes[since:], False)
        every = [ReservationChange(*key, block) for key, block in self.blocks.items()]
        return ReservationChanges(len(self._changes), every, True)
