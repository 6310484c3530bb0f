"""Messages between driver and devices: delivered at once, in order and exactly once, unless a fault says otherwise."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

from tilework.core.time import NS_PER_S
from tilework.sim.clock import Clock
from tilework.sim.faults import FaultInjector

Link = tuple[str, int]
MESSAGE_FAULTS = frozenset({"lost", "delayed", "doubled", "reordered"})
LATE_FAULTS = MESSAGE_FAULTS | {"partition"}


class Network:
    """Delivers messages over links, to and from a device each. A link is first in, first out.

    Messages of a node that is cut off, and of its devices, arrive when it is back. `node` returns that of a device.
    """

    def __init__(self, clock: Clock, injector: FaultInjector, node: Callable[[int], int]) -> None:
        self._clock = clock
        self._injector = injector
        self._node = node
        self._free_ns: dict[Link, int] = {}
        self._cut_until_ns: dict[int, int] = {}
        self._held = defaultdict[tuple[int, bool], deque[Callable[[], None]]](deque)  # Keys: node and direction.
        self.is_reliable = not any(name in injector.faults for name in LATE_FAULTS)

    @property
    def is_instant(self) -> bool:
        """True if a message sent now is delivered before anything else happens."""
        return self.is_reliable and not self._clock.is_paused

    def cut(self, node: int, until_ns: int) -> bool:
        """Cut a node off until then; returns False if it is cut off already."""
        if self._clock.now_ns <= self._cut_until_ns.get(node, -1):
            return False
        self._cut_until_ns[node] = until_ns
        return True

    def deliver(self, node: int, call: Callable[[], None], *, is_device_event: bool = False) -> None:
        """Call when a message between the server and the agent of a node arrives: once, and after those before it.

        A message to a node is a device event: it does not wait until the controller resumes.
        """
        at_ns = max(self._clock.now_ns, self._cut_until_ns.get(node, 0))
        held = self._held[node, is_device_event]
        if self._clock.is_paused and not is_device_event:
            at_ns = max(at_ns, self._clock.resume_ns)
        if not held and at_ns == self._clock.now_ns:
            call()
            return
        held.append(call)
        self._clock.at(at_ns, partial(self._deliver_first, held), is_device_event=is_device_event)

    def _deliver_first(self, held: deque[Callable[[], None]]) -> None:
        held.popleft()()

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
        """Return the times at which a message arrives; two if it is doubled."""
        injector = self._injector
        now_ns = self._clock.now_ns
        at_ns = max(now_ns, self._free_ns.get(link, 0), self._cut_until_ns.get(self._node(link[1]), 0))
        if injector.injects("delayed"):
            at_ns += round(injector.magnitude("delayed") * NS_PER_S)
        self._free_ns[link] = at_ns
        if injector.injects("reordered"):
            at_ns += round(injector.magnitude("reordered") * NS_PER_S)
        if injector.injects("doubled"):
            return [at_ns, at_ns + round(injector.magnitude("doubled") * NS_PER_S)]
        return [at_ns]
