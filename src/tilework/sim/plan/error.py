"""How far simulation was from a live server, the last time that the two were compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from tilework.core.request import Request
from tilework.sim.config import SimConfig
from tilework.sim.plan.judge import Decided, Judge
from tilework.sim.plan.trial import Question
from tilework.sim.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanError:
    """The shares on time of the same requests, `simulated` and `live`, and where that was measured."""

    simulated: float
    live: float
    num_requests: int
    source: str

    @property
    def points(self) -> float:
        """Simulated minus live, in points: more than 0 where a plan promises too much."""
        return 100 * (self.simulated - self.live)


def shipped_error() -> PlanError:
    """That of the bench `modelled`: a live server with eight simulated GPUs, predicted from the cost table alone."""
    document = json.loads(files("tilework.data").joinpath("plan_error.json").read_text("utf-8"))
    return PlanError(
        simulated=document["predicted"],
        live=document["live"],
        num_requests=document["num_requests"],
        source=document["source"],
    )


def error_of_live(
    question: Question, hardware: str, num_devices: int, requests: Sequence[Request], num_met: int, source: str
) -> PlanError:
    """That of requests that a live server has had: simulated on as many devices, of which `num_met` were on time.

    Requests without a deadline are simulated, too, and not counted.
    """
    judge = Judge(requests, target=-1.0)  # To the end, however many are late.
    config: SimConfig = replace(question.sim, num_devices=num_devices)
    try:
        Simulation(question.controller, question.tables[hardware], config).run(requests, observe=judge)
        judge.end()
    except Decided:
        pass
    blocks = judge.blocks()
    num_due = sum(block.num_due for block in blocks)
    simulated = sum(block.num_on_time for block in blocks) / num_due
    return PlanError(simulated=simulated, live=num_met / num_due, num_requests=num_due, source=source)
