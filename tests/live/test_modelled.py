"""Pretended devices: real processes, groups and blobs around a model that only takes its time."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

import tiny
from stages import DIFFUSE
from tilework.cli.commands.serve import simulated_source
from tilework.cli.console import UserError
from tilework.control.controller import ControllerConfig
from tilework.control.log import replay
from tilework.core.checkpoint import Checkpoint
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.lora import UsedLora
from tilework.core.model import SimulatedSource
from tilework.core.request import OnMiss, Refusal, Shape, Status, Terms
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Outcome, Wanted
from tilework.worker.simulated import SimulatedFamily
from waiting import PATIENCE_S

T = TypeVar("T")
STEP_S = {1: 0.08, 2: 0.05, 4: 0.03}
ROWS = (
    *(
        CostRow(
            pipeline="pretended",
            stage="diffuse",
            height=side,
            width=side,
            degree=degree,
            seconds=seconds * (side / 512) ** 2,
        )
        for side in (256, 512)
        for degree, seconds in STEP_S.items()
    ),
    CostRow(pipeline="pretended", stage="decode", height=512, width=512, seconds=0.04),
)
TABLE = CostTable(hardware="four pretended devices", rows=ROWS, steps=5)
SOURCE = SimulatedSource(pipeline="pretended", hardware=TABLE.hardware, steps=5, rows=ROWS)


class Rig:
    def __init__(self, policy: str, table: CostTable = TABLE, begin_ns: int = 0) -> None:
        self.runner = asyncio.Runner()
        self.log = io.StringIO()
        executor = LocalExecutor(LocalConfig(num_workers=4, sources=(SOURCE,)))
        config = EngineConfig(controller=ControllerConfig(policy=policy), table=table, begin_ns=begin_ns)
        self.engine = self.run(EngineStart(config, executor, self.log).start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, PATIENCE_S))

    async def outcome(self, uid: str, **changes: Any) -> Outcome:
        spec = tiny.spec(**({"height": 512, "width": 512, "steps": 5, "guidance_scale": 1.0} | changes))
        answer = self.engine.submit({uid: spec})
        assert isinstance(answer, tuple)
        return await answer[0].outcome

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()


@pytest.mark.parametrize(("policy", "degree"), [("fixed-sp1", 1), ("fixed-sp4", 4)])
def test_steps_take_the_time_of_the_table(policy: str, degree: int) -> None:
    rig = Rig(policy)

    async def together() -> list[Outcome]:
        return await asyncio.gather(*(rig.outcome(str(index), seed=index) for index in range(3)))

    try:
        outcomes = rig.run(together())
    finally:
        rig.close()
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        steps = [segment for segment in outcome.segments if segment.stage == DIFFUSE]
        assert {len(segment.devices) for segment in steps} == {degree}
        shortest_s = min((segment.end_ns - segment.start_ns) / 1e9 / segment.num_steps for segment in steps)
        # At least the table's time; by how much more, the machine that tests decides.
        assert STEP_S[degree] * 0.99 <= shortest_s <= STEP_S[degree] * 4
        assert outcome.image is not None
        assert len(outcome.image.pixels) == 512 * 512 * 3
    colours = {bytes(outcome.image.pixels[:3]) for outcome in outcomes if outcome.image}
    assert len(colours) == 3, "each seed has its colour"
    assert replay(rig.log.getvalue().splitlines())[1] is None


def test_what_the_next_start_cannot_serve_any_more_ends_by_its_reason() -> None:
    """A deadline may have passed while no server ran, a LoRA gone."""
    now_ns, spec = 10 * NS_PER_S, tiny.spec(height=512, width=512, steps=5)
    wanted = Wanted(uid="a", model="pretended", spec=spec, arrival_ns=0, deadline_ns=NS_PER_S, terms=Terms())
    late = replace(wanted, uid="late", terms=Terms(on_miss=OnMiss.DROP))
    changed = replace(wanted, uid="changed", spec=replace(spec, loras=(UsedLora("ink", 1.0),)))
    gone = replace(wanted, uid="gone", model="house")
    rig = Rig("tridentserve", begin_ns=now_ns)

    async def restored() -> list[Outcome]:
        tickets = rig.engine.restore([(one, Checkpoint()) for one in (wanted, late, changed, gone)])
        return await asyncio.gather(*(one.outcome for one in tickets))

    try:
        outcomes = rig.run(restored())
    finally:
        rig.close()
    assert [one.status for one in outcomes] == [Status.DONE, Status.EXPIRED, Status.FAILED, Status.FAILED]
    assert [one.reason for one in outcomes[2:]] == [
        "pretended has no LoRA ink any more",
        "the model house is not served any more",
    ]
    assert [one.refusal for one in outcomes] == [None, None, Refusal.MODEL, Refusal.MODEL]


@pytest.mark.slow
def test_workers_have_all_components_of_their_model() -> None:
    """A table may say that devices are too small for all; workers that serve have loaded all, and load nothing more."""
    components = {"pretended": {"denoiser": Component("d", 8), "vae": Component("v", 2)}}
    rig = Rig(
        "fixed-sp1",
        replace(TABLE, components=components, memory_bytes=8, load_bytes_per_s={LoadSource.DISK: 1.0}),
    )
    try:
        outcome = rig.run(rig.outcome("a"))
    finally:
        rig.close()
    assert outcome.status is Status.DONE, outcome.reason
    lines = rig.log.getvalue().splitlines()
    assert '"components":["d","v"]' in lines[1]
    assert "LoadComponents" not in rig.log.getvalue()
    assert replay(lines)[1] is None


def test_a_modelled_family_describes_what_its_table_knows() -> None:
    info = SimulatedFamily(SOURCE).info
    assert (info.name, info.default_steps, info.max_degree, info.two_passes) == ("pretended", 5, 4, False)
    assert Shape(info.default_height, info.default_width) == Shape(512, 512)


def test_a_modelled_server_needs_a_table_that_has_its_model() -> None:
    assert simulated_source(TABLE, "") == SOURCE
    assert simulated_source(TABLE, "pretended") == SOURCE
    with pytest.raises(UserError, match="needs --cost"):
        simulated_source(None, "")
    with pytest.raises(UserError, match="MODEL is 'other'; the cost table has pretended"):
        simulated_source(TABLE, "other")
