"""What idle devices load ahead of need: what is expected to save most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.graph.stage import Stage
from tilework.core.interfaces import DeviceView
from tilework.core.work import Preload
from tilework.policy.lookahead.eviction import Eviction

_PAYBACK_S = 600.0  # A load must save more time than it takes within this time.
_SOON_S = 180.0  # One that drops nothing pays if its device is expected to be asked for it within this time.
_MOST_TRIED = 8  # Stages per device, those that are asked for most often.
_State = tuple[object, ...]


@dataclass(slots=True)
class Preloading:
    """Chooses loads ahead of need, one at a time on a node or pool, of what its host has (`Reading`).

    A load pays if it lowers the expected time of misses (`Eviction`) by more than it takes itself, within minutes. What
    is dropped for it counts, so that two loads never undo each other while rates stay the same. Copies of popular
    components on several devices come from the same rule.

    Where nothing is dropped for it, it pays if this device is expected to be asked for it within minutes, as much as
    any other: copies elsewhere help no request that comes while those devices are busy. So a device that has dropped
    weights for the activations of a large decode has them again as soon as it is idle.
    """

    _refused: dict[int, _State] = field(default_factory=dict)  # By pool: the latest state in which no load paid.

    def best(self, eviction: Eviction, devices: Sequence[DeviceView], idle: Sequence[DeviceView]) -> list[Preload]:
        """The load that saves most for its time, on one of the idle devices of a node; none if none pays.

        It is computed again when a request has come, other devices are idle, or devices have other components.
        """
        if not idle or any(device.is_loading for device in devices):
            return []
        state: _State = (
            eviction.rates.num_requests,
            tuple(device.device_id for device in idle),
            tuple(device.memory for device in devices),
        )
        pool = devices[0].pool
        if self._refused.get(pool) == state:
            return []
        asked = stages_by_rate(eviction, idle[:1])
        options = [option for device in idle for option in _options(eviction, device, asked)]
        saved, best = max(options, key=lambda option: option[0], default=(0.0, None))
        if best is not None and saved > 1:
            return [best]
        self._refused[pool] = state
        return []


def stages_by_rate(eviction: Eviction, devices: Sequence[DeviceView]) -> list[Stage]:
    """The stages of these devices that were asked for, most often first. Those of a removed model need nothing."""
    rates, now_ns, pools = eviction.rates, eviction.now_ns, eviction.costs.pools
    served = (one for one in rates.stages if any(pools.serves(each.device_id, one.pipeline) for each in devices))
    needed = {stage: wanted for stage in served if (wanted := eviction.costs.components(stage))}
    rarest = {stage: min(rates.per_s(one, now_ns) for one in wanted) for stage, wanted in needed.items()}
    return sorted(rarest, key=lambda stage: -rarest[stage])


def _options(eviction: Eviction, device: DeviceView, asked: Sequence[Stage]) -> Iterator[tuple[float, Preload | None]]:
    """Loads of a device, each with what it saves within its payback time, over the time that it takes."""
    costs, before, group = eviction.costs, eviction.holdings(device.node), (device.device_id,)
    num_devices = len(eviction.view.devices)
    lacking = (stage for stage in asked if not device.memory.has(costs.components(stage)))
    for stage in islice(lacking, _MOST_TRIED):
        wanted, load_ns = costs.components(stage), eviction.view.load_ns(device.device_id, stage)
        is_on_host = all(one in before.host.components or one in device.memory.components for one in wanted)
        if load_ns and is_on_host and device.memory.can_hold(wanted):
            order = eviction.order(group, stage)
            after = before.after(group, wanted, order)
            changed = sorted({*device.memory.components, *wanted, *before.host.components})
            saved_ns = sum(eviction.miss_ns(one, before) - eviction.miss_ns(one, after) for one in changed)
            saved = _PAYBACK_S * saved_ns / load_ns
            if device.memory.has_room(wanted):
                saved = max(saved, _SOON_S * eviction.rates.per_s(wanted[0], eviction.now_ns) / num_devices)
            yield saved, Preload(device_id=device.device_id, stage=stage, drop_order=order)
