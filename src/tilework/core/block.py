"""Blocks of device x time: the remaining work of a job (`Demand`), and what is reserved for it (`Block`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilework.core.pools import Within
from tilework.core.work import Group


class Demand(NamedTuple):
    """The remaining work of a job as blocks of device x time, one after another, `run_ns` in all.

    The first device is taken from start to end: it runs the stages without steps, too. The other devices, of `width`,
    are not taken in the first `before_ns` and the last `after_ns`. `slot` is the time, from and until, counted from the
    start, in which a CPU slot is taken; None: never. The first device waits meanwhile.
    """

    width: int
    run_ns: int
    before_ns: int = 0
    after_ns: int = 0
    slot: tuple[int, int] | None = None

    @property
    def device_ns(self) -> int:
        """Time of all its accelerators together."""
        others = self.width - 1
        return self.run_ns + others * (self.run_ns - self.before_ns - self.after_ns) if others else self.run_ns

    @property
    def is_flat(self) -> bool:
        """True if all its devices are taken from start to end, and no CPU slot is."""
        return not self.before_ns and not self.after_ns and self.slot is None


@dataclass(frozen=True, slots=True)
class Block:
    """The reservation for the remaining work of a promised job: `demand`, not before `ready_ns`, due at `due_ns`.

    `devices` is the group on which the job is to run, the device for stages without steps first; empty if none is
    chosen yet. `slot` is its CPU slot if it needs one; None if none is chosen yet, or none is up. `demand` assumes that
    certain components are loaded; `unloaded` is the demand where they must be loaded: on other devices, or after other
    works on these. It is None if `demand` assumes none. Only devices `within` may run it.
    """

    due_ns: int
    ready_ns: int
    demand: Demand
    devices: Group = ()
    slot: int | None = None
    unloaded: Demand | None = None
    within: Within = None

    def after(self, ready_ns: int) -> Block:
        """Return the block for a job that has works until `ready_ns`. Written out: `replace` takes twice as long."""
        return Block(self.due_ns, ready_ns, self.demand, self.devices, self.slot, self.unloaded, self.within)

    @property
    def if_unloaded(self) -> Block:
        """Block in case the components of the job's next stages are not on its devices when it begins."""
        return self if self.unloaded is None else replace(self, demand=self.unloaded, unloaded=None)

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Yield each of its devices with when it is taken, from and until, counted from the start of the block."""
        demand = self.demand
        for index, device_id in enumerate(self.devices):
            yield device_id, demand.before_ns if index else 0, demand.run_ns - (demand.after_ns if index else 0)
        if self.slot is not None and demand.slot is not None:
            yield self.slot, *demand.slot
