"""The error of simulation against a live server or another simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files

from tilework.core.request import Request
from tilework.sim.config import SimConfig
from tilework.sim.plan.interval import Decided, Judge
from tilework.sim.plan.trial import Question
from tilework.sim.simulation import Simulation


class ComparedWith(StrEnum):
    """Earlier server of the same requests, in words."""

    SERVER = "a live server"
    SIMULATED_DEVICES = "a live server with simulated devices"
    SIMULATION = "the simulation that was logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanError:
    """The shares on time of the same requests, `simulated` and `live`, and where that was measured.

    `live` is the share of what it is `compared_with`, be that a simulation, too.
    """

    simulated: float
    live: float
    num_requests: int
    source: str
    compared_with: ComparedWith

    @property
    def points(self) -> float:
        """Simulated minus live, in points: more than 0 where a plan promises too much."""
        return 100 * (self.simulated - self.live)


def shipped_error() -> PlanError:
    """Error of the bench `modelled`: a live server with eight simulated GPUs, predicted from the cost table alone."""
    document = json.loads(files("tilework.data").joinpath("plan_error.json").read_text("utf-8"))
    return PlanError(
        simulated=document["predicted"],
        live=document["live"],
        num_requests=document["num_requests"],
        source=document["source"],
        compared_with=ComparedWith.SIMULATED_DEVICES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """Earlier run of the same requests: number of devices, server, and deadlines met."""

    num_devices: int
    num_met: int
    source: str
    served_by: ComparedWith = ComparedWith.SERVER


def error_of_run(question: Question, hardware: str, requests: Sequence[Request], run: PastRun) -> PlanError:
    """Measure the error on requests that have run: simulate them on as many devices.

    Requests without a deadline are simulated, too, and not counted.
    """
    judge = Judge(requests, target=-1.0)  # To the end, however many are late.
    config: SimConfig = replace(question.sim, num_devices=run.num_devices)
    try:
        Simulation(question.controller, question.tables[hardware], config).run(requests, observe=judge)
        judge.end()
    except Decided:
        pass
    blocks = judge.blocks()
    num_due = sum(block.num_due for block in blocks)
    simulated = sum(block.num_on_time for block in blocks) / num_due
    return PlanError(
        simulated=simulated,
        live=run.num_met / num_due,
        num_requests=num_due,
        source=run.source,
        compared_with=run.served_by,
    )
