"""Messages between driver and devices: in order, each once and at once, unless faults say otherwise."""

from __future__ import annotations

from collections.abc import Callable

from tilework.core.time import NS_PER_S
from tilework.sim.clock import Clock
from tilework.sim.faults import Dice

Link = tuple[str, int]


class Mail:
    """Delivers what is sent over links, each of which is first in, first out by itself."""

    def __init__(self, clock: Clock, dice: Dice) -> None:
        self._clock = clock
        self._dice = dice
        self._free_ns: dict[Link, int] = {}
        kinds = ("lost", "delayed", "doubled", "reordered")
        self.is_safe = not any(kind in dice.faults for kind in kinds)

    @property
    def is_instant(self) -> bool:
        """Whether what is sent now is delivered before anything else happens."""
        return self.is_safe and not self._clock.is_asleep

    def send(self, link: Link, deliver: Callable[[], None]) -> None:
        if self.is_safe:
            if self._clock.is_asleep:
                self._clock.at(self._clock.back_ns, deliver)
            else:
                deliver()
        elif not self._dice.strikes("lost"):
            for at_ns in self._arrivals_ns(link):
                self._clock.at(at_ns, deliver)

    def _arrivals_ns(self, link: Link) -> list[int]:
        dice, now_ns = self._dice, self._clock.now_ns
        at_ns = max(now_ns, self._free_ns.get(link, 0))
        if dice.strikes("delayed"):
            at_ns += round(dice.extent("delayed") * NS_PER_S)
        self._free_ns[link] = at_ns
        if dice.strikes("reordered"):
            at_ns += round(dice.extent("reordered") * NS_PER_S)
        if dice.strikes("doubled"):
            return [at_ns, at_ns + round(dice.extent("doubled") * NS_PER_S)]
        return [at_ns]
