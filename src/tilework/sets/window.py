"""Busy time of devices in a window that moves on with time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_NUM_PARTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of devices in a window, of which `measured_ns` have passed since the first device joined.

    `share` is their busy time over the time that they were there; `by_stage` is the part of it that each stage took,
    `by_device` the share of each device.
    """

    measured_ns: int
    share: float
    by_stage: Mapping[str, float]
    by_device: Mapping[int, float]


@dataclass(slots=True)
class _BusyPart:
    """Busy times in a part of the window, from `start_ns` on."""

    start_ns: int
    by_device: Counter[int] = field(default_factory=Counter)
    by_stage: Counter[tuple[str, int]] = field(default_factory=Counter)  # By device, too, so that it can be left out.


class UseWindow:
    """Adds up works as they end: a running work does not count yet. Times only grow."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self._part_ns = max(1, window_ns // _NUM_PARTS)
        self._parts: deque[_BusyPart] = deque()
        self._joined_ns: dict[int, int] = {}
        self._first_ns: int | None = None

    def joined(self, device_id: int, now_ns: int) -> None:
        """Count a device, which takes work from now on."""
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        self._joined_ns[device_id] = now_ns

    def lost(self, device_id: int) -> None:
        """Count a device no longer, nor what it did."""
        self._joined_ns.pop(device_id, None)
        for part in self._parts:
            del part.by_device[device_id]
            part.by_stage = Counter({key: ns for key, ns in part.by_stage.items() if key[1] != device_id})

    def ran(self, stage: str, devices: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Count a work of a stage that has run on devices; lost devices do not count."""
        self._move_on(end_ns)
        for part in reversed(self._parts):
            busy_ns = min(end_ns, part.start_ns + self._part_ns) - max(start_ns, part.start_ns)
            if part.start_ns + self._part_ns <= start_ns:
                return
            for device_id in devices if busy_ns > 0 else ():
                if device_id in self._joined_ns:
                    part.by_device[device_id] += busy_ns
                    part.by_stage[stage, device_id] += busy_ns

    def _move_on(self, now_ns: int) -> None:
        """Begin the parts up to now, and forget those before the window."""
        start_ns = now_ns - now_ns % self._part_ns
        first_ns = max(self._first_ns or 0, start_ns - self.window_ns + self._part_ns)
        next_ns = self._parts[-1].start_ns + self._part_ns if self._parts else first_ns - first_ns % self._part_ns
        for begin_ns in range(max(next_ns, start_ns - self.window_ns + self._part_ns), start_ns + 1, self._part_ns):
            self._parts.append(_BusyPart(begin_ns))
        while self._parts and self._parts[0].start_ns <= start_ns - self.window_ns:
            self._parts.popleft()

    def use(self, now_ns: int, devices: Collection[int]) -> Use:
        """Return the use of these devices, without those that are not there."""
        self._move_on(now_ns)
        begin_ns = now_ns - now_ns % self._part_ns - self.window_ns + self._part_ns
        there = {one: now_ns - max(begin_ns, self._joined_ns[one]) for one in devices if one in self._joined_ns}
        busy, by_stage = Counter[int](), Counter[str]()
        for part in self._parts:
            busy.update(part.by_device)
            for (stage, device_id), ns in part.by_stage.items():
                by_stage[stage] += ns if device_id in there else 0
        total_ns = max(1, sum(there.values()))
        return Use(
            measured_ns=0 if self._first_ns is None else min(self.window_ns, now_ns - self._first_ns),
            share=_share(sum(busy[one] for one in there), total_ns),
            by_stage={stage: _share(ns, total_ns) for stage, ns in sorted(by_stage.items()) if ns},
            by_device={one: _share(busy[one], max(1, ns)) for one, ns in there.items()},
        )


def _share(busy_ns: int, total_ns: int) -> float:
    return min(1.0, busy_ns / total_ns)
