"""Simulated runs with their event logs and histories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from builders import request, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.history import History
from tilework.control.history_recorder import read_history
from tilework.control.log import entry_line, header_line
from tilework.core.actions import Action, RunWork
from tilework.core.events import Broken, DeviceJoined, DeviceLost, Event, Submitted, WorkFinished
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, ns_from_s
from tilework.core.work import Work
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class Recorded:
    lines: list[str]
    trace: Trace
    history: History

    def write(self, path: Path) -> Path:
        path.write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")
        return path


def recorded(
    requests: Iterable[Request],
    policy: str = "edf",
    *,
    sim: SimConfig | None = None,
    costs: CostTable | None = None,
    devices: CostTable | None = None,
    cancels: tuple[tuple[int, str], ...] = (),
) -> Recorded:
    config, known = ControllerConfig(policy=policy), costs or table()
    lines = [header_line("1.0", config, known)]

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        lines.append(entry_line(event, actions, now_ns))

    simulation = Simulation(config, known, sim or SimConfig(num_devices=2), devices)
    trace = simulation.run(requests, cancels, observe)
    return Recorded(lines, trace, read_history(lines))


class Play:
    """A controller that is told events by hand, and its log."""

    def __init__(self, policy: str, num_devices: int, costs: CostTable) -> None:
        config = ControllerConfig(policy=policy)
        self.controller = Controller(config, costs)
        self.lines = [header_line("1.0", config, costs)]
        self.now_ns = 0
        for device_id in range(num_devices):
            self.tell(DeviceJoined(device_id, 0))

    def tell(self, event: Event, after_s: float = 0.0) -> list[Work]:
        """Let time pass, then tell an event; returns the works that the controller begins."""
        self.now_ns += ns_from_s(after_s)
        actions = self.controller.handle(event, self.now_ns)
        self.lines.append(entry_line(event, actions, self.now_ns))
        return [action.work for action in actions if isinstance(action, RunWork)]

    def finish(self, work: Work, run_s: float) -> list[Work]:
        return self.tell(WorkFinished(work.work_id, ns_from_s(run_s)), run_s)


def lost_and_broken() -> tuple[list[str], Work]:
    """A log in which GPU 3 of a group of four is lost after 50 ms of a work, a survivor reports one step, and GPU 3
    comes back a second later; also that work. The request is never finished.
    """
    play = Play("fixed-sp4", 4, table(degrees=(1, 2, 4)))
    (encode, *queued) = play.tell(Submitted(request("a", slo_s=3.0)))
    begun = [*queued, *play.finish(encode, 0.01)]
    work = next(one for one in begun if len(one.devices) == 4)
    play.tell(DeviceLost(3, "killed by signal 9"), 0.05)
    play.tell(Broken(work.work_id, 1), 0.01)
    play.tell(DeviceJoined(3, 0), 1.0)
    return play.lines, work


SOON_NS = 400 * NS_PER_MS


def record(
    requests: Iterable[Request],
    policy: str = "edf",
    *,
    sim: SimConfig | None = None,
    cancels: Iterable[tuple[int, str]] = (),
    costs: CostTable | None = None,
) -> tuple[list[str], Trace]:
    """The log of a simulation, of one device by default, and its trace."""
    one = recorded(requests, policy, sim=sim or SimConfig(num_devices=1), costs=costs, cancels=tuple(cancels))
    return one.lines, one.trace


def cancelled_at_work(requests: list[Request], *indices: int) -> list[tuple[int, str]]:
    """Cancellations soon after the arrival of these requests."""
    return [(requests[index].arrival_ns + 400 * NS_PER_MS, requests[index].uid) for index in indices]


def find(lines: list[str], *parts: str, after: int = 0) -> int:
    """Index of the first entry with all these parts; its line number is one more."""
    return next(i for i, line in enumerate(lines) if i > after and all(part in line for part in parts))
