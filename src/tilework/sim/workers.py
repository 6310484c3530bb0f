"""Workers of simulated devices: start, crash, hang and restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from tilework.core.component import Memory
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Group
from tilework.sim.clock import Clock
from tilework.sim.config import DeviceLayout
from tilework.sim.faults import FaultInjector
from tilework.sim.fleet import Fleet
from tilework.sim.runs import Run

MAX_STARTS = 4  # Failed starts in a row after which a worker is given up.
REJOIN_S = 1.0  # From the end of a session of a node to the next.
_DETECTION_NS = 10 * NS_PER_MS  # From the death of a worker until the server notices.


class Workers:
    """One worker per device, restarted whenever it dies; `memory` returns what a device has when it starts.

    `on_joined` is called when a worker is up. `on_dead` is called at once when one dies, and `on_node_dead` when all of
    a node die; both return what is called when the server can learn of it. `on_cut_off` is called when a node is cut
    off from the server: for how long, and what is to be called if the node ends its session. When a node is about to
    leave, `on_leaving` is called, and then `lets_go` until it allows that; both are given the node and its devices.
    `on_given_up` is called
    when a worker is given up, with the devices that are left: with none if those of some kind are all given up.
    `on_cut` is called at once when a worker dies, with the run that is left to the rest of its group.
    """

    def __init__(
        self,
        clock: Clock,
        injector: FaultInjector,
        fleet: Fleet,
        *,
        layout: DeviceLayout,
        memory: Callable[[int], Memory],
        on_joined: Callable[[int], None],
        on_dead: Callable[[int, str], Callable[[], None]],
        on_node_dead: Callable[[int, Group, str], Callable[[], None]],
        on_cut_off: Callable[[int, int, Callable[[], None]], None],
        on_leaving: Callable[[int, Group], None],
        lets_go: Callable[[int, Group], bool],
        on_given_up: Callable[[Collection[int]], None],
        on_cut: Callable[[Run | None], None],
    ) -> None:
        self._clock = clock
        self._injector = injector
        self._fleet = fleet
        self._layout = layout
        self._memory = memory
        self._on_joined = on_joined
        self._on_given_up = on_given_up
        self._on_cut = on_cut
        self._on_dead = on_dead
        self._on_node_dead = on_node_dead
        self._on_cut_off = on_cut_off
        self._on_leaving = on_leaving
        self._lets_go = lets_go
        self._incarnations = dict.fromkeys(layout.ids, 0)
        self._starting = set(layout.ids)
        self._starts = dict.fromkeys(layout.ids, 0)
        self._leaving: set[int] = set()  # Nodes.
        self._epoch = 0

    def unless_dead(self, device_id: int, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that does nothing if the device's current worker has died by then."""
        incarnation = self._incarnations[device_id]
        return lambda: call() if self._fleet.is_up(device_id) and self._incarnations[device_id] == incarnation else None

    def unless_restarted(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that does nothing if the server has been restarted by then."""
        epoch = self._epoch
        return lambda: call() if epoch == self._epoch else None

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call after a delay, unless the server has been restarted by then."""
        self._clock.at(self._clock.now_ns + delay_ns, self.unless_restarted(call))

    # Faults.

    def inject_faults(self, run: Run) -> None:
        """Schedule faults of workers and nodes at random times of a run, at most one second after its start."""
        injector = self._injector
        length_ns = min(run.end_ns, run.start_ns + NS_PER_S) - run.start_ns
        for device_id in run.devices:
            for fault in ("crash", "hang"):
                if injector.injects(fault):
                    at_ns = run.start_ns + int(injector.fraction(fault) * length_ns)
                    inject = self.unless_dead(device_id, partial(self._inject, fault, device_id))
                    self._clock.at(at_ns, inject, is_device_event=True)
        for fault, end_node in (("node", self._kill_node), ("leave", self._leave), ("partition", self._cut_off)):
            if injector.injects(fault):
                at_ns = run.start_ns + int(injector.fraction(fault) * length_ns)
                size_s = injector.magnitude(fault)
                end = self.unless_dead(run.devices[0], partial(end_node, self._layout.node(run.devices[0]), size_s))
                self._clock.at(at_ns, end, is_device_event=True)

    def _inject(self, fault: str, device_id: int) -> None:
        if fault == "crash":
            self.kill(device_id, "it was killed", self._injector.magnitude("crash"))
        else:
            self._fleet.hang(device_id)

    def kill(self, device_id: int, reason: str, down_s: float) -> None:
        """Kill the worker of a device, if it is up. It is restarted after `down_s`."""
        if self._fleet.is_up(device_id):
            self._end(device_id)
            self.after(_DETECTION_NS, self._on_dead(device_id, reason))
            self._start_after(down_s, device_id)

    def _kill_node(self, node: int, down_s: float) -> None:
        """Kill all workers of a node. They are restarted after `down_s`."""
        devices = self._layout.all_of(node)
        self._end_node(devices, down_s)
        self.after(_DETECTION_NS, self._on_node_dead(node, devices, "all its workers ended"))

    def _cut_off(self, node: int, length_s: float) -> None:
        """Cut a node off, if there are others. It ends its workers if it is given up meanwhile, and begins anew."""
        if self._layout.num_nodes > 1:
            end_workers = partial(self._end_node, self._layout.all_of(node), REJOIN_S)
            self._on_cut_off(node, round(length_s * NS_PER_S), end_workers)

    def _end_node(self, devices: Collection[int], down_s: float) -> None:
        """End the workers of a node, also those that are being started, and start them after `down_s`."""
        for one in devices:
            if self._fleet.is_up(one):
                self._end(one)
            if one in self._starting:
                self._start_after(down_s, one)

    def _leave(self, node: int, down_s: float) -> None:
        """Let a node leave. Its workers are restarted `down_s` after that, and no one before it."""
        if node not in self._leaving:
            self._leaving.add(node)
            self._on_leaving(node, tuple(one for one in self._layout.all_of(node) if self._fleet.is_up(one)))
            self._go(node, down_s)

    def _go(self, node: int, down_s: float) -> None:
        devices = self._layout.all_of(node)
        if not self._lets_go(node, devices):
            self.after(_DETECTION_NS, partial(self._go, node, down_s))
            return
        self._leaving.remove(node)
        if any(self._fleet.is_up(one) for one in devices):  # All may have died meanwhile.
            self._end_node(devices, down_s)
            self._on_node_dead(node, devices, "it has left")()

    def _end(self, device_id: int) -> None:
        self._incarnations[device_id] += 1
        self._on_cut(self._fleet.lose(device_id, self._clock.now_ns))
        self._starting.add(device_id)

    def _start_after(self, down_s: float, device_id: int, attempt: int = 1) -> None:
        """Start a worker later, unless another one of its device is to be started by then."""
        self._starts[device_id] = number = self._starts[device_id] + 1

        def start() -> None:
            if self._starts[device_id] == number:
                self._start(device_id, attempt)

        self.after(_DETECTION_NS + round(down_s * NS_PER_S), start)

    # Starts.

    def start_all(self, late_s: Mapping[int, float]) -> None:
        """Start all workers, those of some nodes later: after these seconds, by node."""
        for device_id in self._incarnations:
            node = self._layout.node(device_id)
            if node in late_s:
                self._start_after(late_s[node], device_id)
            else:
                self._start(device_id)

    def _start(self, device_id: int, attempt: int = 1) -> None:
        """Start a worker. It joins, or tries again later if it cannot load its model, or while its node leaves."""
        if self._layout.node(device_id) in self._leaving:
            self._start_after(0.0, device_id, attempt)
            return
        if self._injector.injects("load"):
            if attempt < MAX_STARTS:
                self._start_after(self._injector.magnitude("load"), device_id, attempt + 1)
                return
            self._starting.discard(device_id)
            self._on_given_up(self._left())
            return
        self._starting.discard(device_id)
        self._fleet.join(device_id, self._memory(device_id))
        self._on_joined(device_id)

    def _left(self) -> Collection[int]:
        """Return the devices that are up or will be; none if that is so of those of some kind."""
        left = [one for one in self._incarnations if one in self._starting or self._fleet.is_up(one)]
        return left if set(map(self._layout.kind, left)) == set(map(self._layout.kind, self._incarnations)) else ()

    def lose_all(self) -> None:
        """End all workers, since the server has ended."""
        self._epoch += 1
        self._leaving.clear()
        for device_id in self._incarnations:
            self._incarnations[device_id] += 1
            if self._fleet.is_up(device_id):
                self._fleet.lose(device_id, self._clock.now_ns)
        self._starting = set(self._incarnations)
