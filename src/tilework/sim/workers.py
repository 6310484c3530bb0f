"""Workers of simulated devices: they start, die, hang and are started again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.sim.clock import Clock
from tilework.sim.faults import Dice
from tilework.sim.fleet import Fleet
from tilework.sim.runs import Run

MOST_STARTS = 4  # How often in a row a worker fails to start before it is given up.
_NOTICED_NS = 10 * NS_PER_MS


class Workers:
    """One worker per device, started anew whenever it has died.

    `on_joined` and `on_lost` are called when the server knows; `on_given_up` when no device is up, and none will be;
    `on_cut` at once, with the run of the others of its group that a death leaves.
    """

    def __init__(
        self,
        clock: Clock,
        dice: Dice,
        fleet: Fleet,
        *,
        num_devices: int,
        devices_per_node: int,
        on_joined: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        on_given_up: Callable[[], None],
        on_cut: Callable[[Run | None], None],
    ) -> None:
        self._clock, self._dice, self._fleet = clock, dice, fleet
        self._devices_per_node = devices_per_node
        self._on_joined, self._on_lost, self._on_given_up, self._on_cut = on_joined, on_lost, on_given_up, on_cut
        self._lives = dict.fromkeys(range(num_devices), 0)
        self._starting = set(range(num_devices))
        self._era = 0

    def guard(self, device_id: int, call: Callable[[], None]) -> Callable[[], None]:
        """A call that does nothing if the worker that a device has now has died by then."""
        life = self._lives[device_id]
        return lambda: call() if self._fleet.is_up(device_id) and self._lives[device_id] == life else None

    def of_era(self, call: Callable[[], None]) -> Callable[[], None]:
        """A call that does nothing if the server that wants it is gone by then."""
        era = self._era
        return lambda: call() if era == self._era else None

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call later, unless the server is gone by then."""
        self._clock.at(self._clock.now_ns + delay_ns, self.of_era(call))

    # Faults strike.

    def endanger(self, run: Run) -> None:
        """Let faults strike at some time of a run."""
        dice, length_ns = self._dice, min(run.end_ns, run.start_ns + NS_PER_S) - run.start_ns
        for device_id in run.devices:
            for kind in ("crash", "hang"):
                if dice.strikes(kind):
                    at_ns = run.start_ns + int(dice.share(kind) * length_ns)
                    strike = self.guard(device_id, partial(self._strike, kind, device_id))
                    self._clock.at(at_ns, strike, is_nature=True)
        if dice.strikes("node"):
            first = run.devices[0] // self._devices_per_node * self._devices_per_node
            at_ns, down_s = run.start_ns + int(dice.share("node") * length_ns), dice.extent("node")
            for device_id in range(first, min(len(self._lives), first + self._devices_per_node)):
                die = self.guard(device_id, partial(self.die, device_id, "its node was lost", down_s))
                self._clock.at(at_ns, die, is_nature=True)

    def _strike(self, kind: str, device_id: int) -> None:
        if kind == "crash":
            self.die(device_id, "it was killed", self._dice.extent("crash"))
        else:
            self._fleet.hang(device_id)

    def die(self, device_id: int, why: str, down_s: float) -> None:
        """The worker of a device ends now, if it is up, and is started again after `down_s`."""
        if not self._fleet.is_up(device_id):
            return
        self._lives[device_id] += 1
        self._on_cut(self._fleet.lose(device_id, self._clock.now_ns))
        self._starting.add(device_id)
        self.after(_NOTICED_NS, partial(self._on_lost, device_id, why))
        self.after(_NOTICED_NS + round(down_s * NS_PER_S), partial(self._start, device_id))

    # Workers start.

    def start_all(self) -> None:
        for device_id in self._lives:
            self._start(device_id)

    def _start(self, device_id: int, attempt: int = 1) -> None:
        """Start a worker; when it has loaded its model it joins."""
        if self._dice.strikes("load"):
            if attempt < MOST_STARTS:
                wait_ns = round(self._dice.extent("load") * NS_PER_S)
                self.after(wait_ns, partial(self._start, device_id, attempt + 1))
                return
            self._starting.discard(device_id)
            if not self._starting and not any(map(self._fleet.is_up, self._lives)):
                self._on_given_up()
            return
        self._starting.discard(device_id)
        self._fleet.join(device_id)
        self._on_joined(device_id)

    def lose_all(self) -> None:
        """The whole server is gone."""
        self._era += 1
        for device_id in self._lives:
            self._lives[device_id] += 1
            if self._fleet.is_up(device_id):
                self._fleet.lose(device_id, self._clock.now_ns)
        self._starting = set(self._lives)
