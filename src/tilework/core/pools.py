"""Pools: which accelerators serve which pipelines, and so which of them may form a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeGuard

Within = frozenset[int] | None
"""Ids of the accelerators that may run something; None: all."""


class Pools:
    """The accelerators of each pipeline that not all of them serve, and the pools that follow from these.

    A *pool* is the devices of one node that serve the same pipelines. A group lies in one pool. If all devices serve
    all pipelines, each node is a pool, and the pool has the node's number.
    """

    def __init__(self, devices: Mapping[str, Collection[int]]) -> None:
        """Take the accelerators of each pipeline that not all of them serve."""
        self._within = {pipeline: frozenset(ids) for pipeline, ids in devices.items()}
        kinds: dict[frozenset[str], int] = {frozenset(): 0}  # By the pipelines above that a device serves.
        self._kinds: dict[int, int] = {}
        for device_id in sorted({one for ids in self._within.values() for one in ids}):
            served = frozenset(pipeline for pipeline, ids in self._within.items() if device_id in ids)
            self._kinds[device_id] = kinds.setdefault(served, len(kinds))
        self._num_kinds = len(kinds)

    def within(self, pipeline: str) -> Within:
        """Return the accelerators that serve a pipeline."""
        return self._within.get(pipeline)

    def serves(self, device_id: int, pipeline: str) -> bool:
        """Return whether an accelerator serves a pipeline."""
        return may_run(self._within.get(pipeline), device_id)

    def unserved(self, pipelines: Iterable[str], left: Collection[int]) -> set[str]:
        """Return those of these pipelines that none of the remaining devices serves."""
        return {one for one in pipelines if not any(self.serves(device_id, one) for device_id in left)}

    def number(self, node: int, device_id: int) -> int:
        """Return the number of the pool of an accelerator of this node."""
        return node * self._num_kinds + self._kinds.get(device_id, 0)

    def parts(self, pipeline: str, device_ids: Iterable[int]) -> list[Within]:
        """Divide those of these accelerators that serve a pipeline by what they serve; [None] if nothing differs.

        The parts are pools, except that nodes are not told apart.
        """
        if not self._kinds:
            return [None]
        parts: dict[int, set[int]] = {}
        for device_id in device_ids:
            if self.serves(device_id, pipeline):
                parts.setdefault(self._kinds.get(device_id, 0), set()).add(device_id)
        return [frozenset(ids) for ids in parts.values()]

    def widest(self, pipeline: str) -> int | None:
        """Return the largest number of devices that a pool of a pipeline can have; None: no limit is known."""
        within = self._within.get(pipeline)
        return None if within is None else max(Counter(self._kinds[one] for one in within).values())


def is_devices(value: object) -> TypeGuard[list[int]]:
    """Return whether a value of a file lists devices that serve a pipeline: at least one, each once, by ids from 0."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(one) is int and one >= 0 for one in value) and len(set(value)) == len(value)


def unknown_device(devices: Collection[int] | None, num_devices: int) -> int | None:
    """Return the first of these devices that is not one of `num_devices`; None if all are."""
    return next((one for one in devices or () if one >= num_devices), None)


def may_run(within: Within, device_id: int) -> bool:
    """Return whether a device is one of these."""
    return within is None or device_id in within
