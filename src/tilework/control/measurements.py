"""Devices for measurements of models that are added: which devices a measurement gets, and when.

A measurement is predicted to take twice as long as the longest so far. Rejected: devices that leave and join again,
since promises would be planned as if they never came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.control.cluster.device import Device
from tilework.control.cluster.tracker import Occupation, Tracker
from tilework.control.components import Components
from tilework.core.actions import Action, Measure
from tilework.core.component import num_bytes
from tilework.core.events import MeasurementAsked
from tilework.core.time import NS_PER_S
from tilework.core.work import Group

PATIENCE_NS = 5 * NS_PER_S
"""Time for which a measurement waits for idle devices; then it takes those that will be free first."""
_MOST_CHOICES = 8

_Order = tuple[int, int]
"""Order of devices for a measurement: when they are free, and how many bytes of weights they would lose."""


@dataclass(slots=True, kw_only=True)
class _Measurement:
    """A measurement since it was asked for; `occupied` are its devices, once it has some."""

    asked: MeasurementAsked
    since_ns: int
    occupied: Occupation | None = None
    has_begun: bool = False


class Measurements:
    """Lets one measurement at a time take devices as a work does, so that policy, guard and admission count it as one.

    It takes devices that are idle after the policy has made its starts. If there are none for `PATIENCE_NS`, it takes
    those that are free first, after their works. These devices get no further works, and the measurement begins when
    all of them are idle: no earlier message to them is then in its way.
    """

    def __init__(self, tracker: Tracker, components: Components) -> None:
        self._tracker = tracker
        self._components = components
        self._current: _Measurement | None = None

    def ask(self, asked: MeasurementAsked, now_ns: int) -> None:
        assert self._current is None, f"measurement {asked.measurement_id} is asked for while another one is open"
        self._current = _Measurement(asked=asked, since_ns=now_ns)

    def end(self, measurement_id: int) -> None:
        """Free the devices of a measurement, or stop waiting for some."""
        current = self._current
        assert current is not None
        assert current.asked.measurement_id == measurement_id, f"measurement {measurement_id} is not open"
        self._give_back(current)
        self._current = None

    @property
    def asked(self) -> MeasurementAsked:
        """Request for the measurement that is open."""
        assert self._current is not None
        return self._current.asked

    def choices(self, now_ns: int) -> Sequence[Group]:
        """Return the groups that a measurement which waits for devices may take now, the best one first."""
        current = self._current
        if current is None or current.has_begun:
            return ()
        if current.occupied is not None:
            if self._is_there(current.occupied.devices):
                return ()
            self._give_back(current)
        is_patient = now_ns < current.since_ns + PATIENCE_NS
        pools: dict[int, list[Device]] = {}
        for device in self._tracker.devices:
            is_meant = self.asked.devices is None or device.device_id in self.asked.devices
            if is_meant and not (is_patient and (device.works or device.is_loading)):
                pools.setdefault(device.pool, []).append(device)
        ordered = [sorted((self._order(one), one.device_id) for one in devices) for devices in pools.values()]
        return [group for _, group in sorted(group for pool in ordered for group in self._groups(pool))][:_MOST_CHOICES]

    def _groups(self, pool: Sequence[tuple[_Order, int]]) -> list[tuple[_Order, Group]]:
        """Return each of the ordered devices of a pool alone, or the first `degree` of them together."""
        if self.asked.degree == 1:
            return [(order, (device_id,)) for order, device_id in pool]
        first = pool[: self.asked.degree]
        if len(first) < self.asked.degree:
            return []
        return [(first[-1][0], tuple(sorted(device_id for _, device_id in first)))]

    def _order(self, device: Device) -> _Order:
        lost = device.memory.in_the_way(self.asked.digests, self.asked.room_bytes)
        return device.free_ns, num_bytes(lost)

    def _is_there(self, devices: Group) -> bool:
        """Return whether devices get works, and lie in one pool."""
        found = [self._tracker.device(device_id) for device_id in devices]
        return len({None if one is None else one.pool for one in found}) == 1 and None not in found

    def take(self, devices: Group) -> None:
        """Let the measurement that waits take these devices after their works."""
        assert self._current is not None
        self._current.occupied = self._tracker.occupy(devices, self._current.asked.run_ns, is_closed=True)

    def begin(self) -> list[Action]:
        """Begin the measurement that has devices if they have nothing else to do."""
        current = self._current
        if current is None or current.occupied is None or current.has_begun:
            return []
        devices, stand_ins = current.occupied
        asked = current.asked
        up = [self._tracker.up[device_id] for device_id in devices]
        if any(len(device.works) > len(stand_ins) or device.loads for device in up):
            return []
        self._give_back(current)
        current.occupied = self._tracker.occupy(devices, asked.run_ns, is_closed=False)
        current.has_begun = True
        drops = [self._components.make_room(one, asked.digests, asked.room_bytes) for one in devices]
        return [*(action for actions in drops for action in actions), Measure(asked.measurement_id, devices)]

    def wake_ns(self, now_ns: int) -> int | None:
        """Return when a measurement takes devices that are not idle; None if none waits for that."""
        current = self._current
        if current is None or current.occupied is not None:
            return None
        at_ns = current.since_ns + PATIENCE_NS
        return at_ns if at_ns > now_ns else None

    def _give_back(self, current: _Measurement) -> None:
        if current.occupied is not None:
            self._tracker.vacate(current.occupied)
            current.occupied = None
