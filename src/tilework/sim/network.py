"""Messages between driver and devices: delivered at once, in order and exactly once, unless a fault says otherwise."""

from __future__ import annotations

from collections.abc import Callable

from tilework.core.time import NS_PER_S
from tilework.sim.clock import Clock
from tilework.sim.faults import FaultInjector

Link = tuple[str, int]
MESSAGE_FAULTS = frozenset({"lost", "delayed", "doubled", "reordered"})


class Network:
    """Delivers messages over links. Each link is first in, first out."""

    def __init__(self, clock: Clock, injector: FaultInjector) -> None:
        self._clock = clock
        self._injector = injector
        self._free_ns: dict[Link, int] = {}
        self.is_reliable = not any(name in injector.faults for name in MESSAGE_FAULTS)

    @property
    def is_instant(self) -> bool:
        """Whether a message sent now is delivered before anything else happens."""
        return self.is_reliable and not self._clock.is_paused

    def send(self, link: Link, deliver: Callable[[], None]) -> None:
        """Call `deliver` when the message arrives: never, once or twice."""
        if self.is_reliable:
            if self._clock.is_paused:
                self._clock.at(self._clock.resume_ns, deliver)
            else:
                deliver()
        elif not self._injector.injects("lost"):
            for at_ns in self._arrivals_ns(link):
                self._clock.at(at_ns, deliver)

    def _arrivals_ns(self, link: Link) -> list[int]:
        """The times at which a message arrives; two if it is doubled."""
        injector, now_ns = self._injector, self._clock.now_ns
        at_ns = max(now_ns, self._free_ns.get(link, 0))
        if injector.injects("delayed"):
            at_ns += round(injector.magnitude("delayed") * NS_PER_S)
        self._free_ns[link] = at_ns
        if injector.injects("reordered"):
            at_ns += round(injector.magnitude("reordered") * NS_PER_S)
        if injector.injects("doubled"):
            return [at_ns, at_ns + round(injector.magnitude("doubled") * NS_PER_S)]
        return [at_ns]
