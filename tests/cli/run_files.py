"""Files of simulated runs for tests of the command line: logs, and workloads like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import Result

import tilework
from builders import table
from cli.command_line import invoke
from tilework.cli.views.schedules import ServedRequest
from tilework.control.controller import ControllerConfig
from tilework.control.log import entry_line, header_line
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.core.request import Request
from tilework.formats.workload import WorkloadRequest
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

NUM_REQUESTS = 30


def workload_of(served: list[ServedRequest]) -> tuple[WorkloadRequest, ...]:
    """The requests of a run as a workload, to be simulated or sent again."""
    return tuple(
        WorkloadRequest(
            id=one.request.uid,
            arrival_s=one.arrival_s,
            pipeline=one.request.pipeline,
            height=one.shape.height,
            width=one.shape.width,
            frames=one.shape.frames,
            steps=one.request.steps,
            slo_s=one.slo_s,
            on_miss=one.request.on_miss,
        )
        for one in served
    )


def write_log(path: Path, requests: list[Request], *, dispatch_ns: int = 0, num_devices: int = 2, **more: Any) -> Any:
    """The log of devices that jitter by 5% and lose `dispatch_ns` between two works."""
    config = ControllerConfig(policy="fixed-sp1")
    simulation = Simulation(config, table(), SimConfig(num_devices=num_devices, jitter=0.05, dispatch_ns=dispatch_ns))
    with path.open("w", encoding="utf-8") as lines:
        lines.write(header_line(tilework.__version__, config, table()) + "\n")

        def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
            lines.write(entry_line(event, actions, now_ns) + "\n")

        return simulation.run(requests, observe=observe, **more)


def simulate(files: Path, *arguments: object) -> Result:
    return invoke("simulate", files / "requests.jsonl", "--cost", files / "costs.json", *arguments)
