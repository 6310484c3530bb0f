"""Clips that several workers decode together, on real workers: they stay the same, also if one is killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

import tilework
import tiny
from builders import Idle, table
from runtime.rig import Rig, assert_nothing_is_left, kill
from stages import DECODE
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.core.work import Plan, Start, Work
from tilework.cost.table import graphs_of
from tilework.cost.table_costs import TableCosts
from tilework.pipelines.loading import load
from tilework.policy import registry
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until
from zoo import requests
from zoo.registry import ZOO, build, quiet

pytestmark = pytest.mark.slow
BEYOND = 288  # A tile has sides of 256 px.
WAN = replace(ZOO["wan21"], inputs={**ZOO["wan21"].inputs, "num_inference_steps": 1, "height": BEYOND, "width": 128})


@dataclass(frozen=True)
class DecodeWide(Idle):
    """One request at a time: decodes on all devices that are up, all else on the first of them."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        up = tuple(device.device_id for device in view.devices)
        if any(device.works for device in view.devices):
            return Plan()
        for job in view.waiting():
            if job.left.stage is not None and up:
                devices = up if job.left.stage.name == DECODE else up[:1]
                start = Start(stage=job.left.stage, job_ids=(job.job_id,), devices=devices, num_steps=1, why="wide")
                return Plan(starts=(start,))
        return Plan()


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    registry._GIVEN["decode-wide"] = DecodeWide
    yield
    del registry._GIVEN["decode-wide"]


@dataclass(frozen=True)
class Served:
    """A model on two workers, whole or in tiles, a request for it, and the stock pipeline's clip."""

    rig: Rig
    in_tiles: bool
    spec: Spec
    expected: np.ndarray


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "in tiles"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("wan")
    build(WAN).save_pretrained(str(directory), safe_serialization=True)
    source = ModelSource(path=str(directory), vae_tiling=request.param)
    made = load(source)
    costs = replace(table(degrees=(1, 2), pipeline=directory.name), graphs=graphs_of(made.info.graph))
    stock = tilework.reference(str(directory), vae_tiling=request.param)
    quiet(stock)
    spec, expected = requests.spec_of(WAN, made, seed=1), requests.stock_pixels(WAN, stock, 1)
    rig = Rig(source, "decode-wide", costs=costs)
    try:
        rig.start()
        yield Served(rig, request.param, spec, expected)
    finally:
        rig.close()


async def decoding(rig: Rig) -> Work:
    """Wait until the decode runs."""
    tracker = rig.engine._controller.tracker

    def running() -> list[Work]:
        return [work for device in tracker.devices for work in device.works[:1] if work.stage.name == DECODE]

    await until(lambda: bool(running()))
    (first, *_) = running()
    return first


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_a_clip_that_two_workers_decode_is_the_stock_pipelines(served: Served, victim: int | None) -> None:
    rig = served.rig

    async def scenario() -> tuple[Outcome, Work]:
        ticket = rig.submit(served.spec, f"{victim}")
        assert isinstance(ticket, Ticket)
        seen = await decoding(rig)
        if victim is not None:
            kill(rig, victim)
        outcome = await ticket.outcome
        await until(lambda: rig.engine.status.health().num_devices_up == 2)
        return outcome, seen

    outcome, seen = rig.run(scenario())
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    found = np.frombuffer(outcome.image.pixels, np.uint8).astype(int)
    assert np.abs(found - served.expected).max() <= (0 if served.in_tiles else 1)
    assert seen.devices == (0, 1)
    decodes = [segment.devices for segment in outcome.segments if segment.stage == DECODE]
    assert decodes == [(0, 1)] if victim is None else victim not in decodes[-1] or len(decodes) > 1
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


@pytest.mark.parametrize("policy", ["tilework", "tridentserve"])
@pytest.mark.parametrize("gain", [1.9, 1.0])
def test_a_decode_is_shared_if_the_cost_table_says_that_it_pays(
    policy: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableCosts, "observe", lambda *_: None)  # Whatever this machine would measure.
    tiny.prepare()
    source = ModelSource(path="shapes-motion")
    alone = table(step_s=0.05, degrees=(1, 2), pipeline="shapes-motion")
    decodes = [replace(row, degree=2, seconds=row.seconds / gain) for row in alone.rows if row.stage == DECODE]
    costs = replace(alone, rows=(*alone.rows, *decodes), graphs=graphs_of(load(source).info.graph))
    rig = Rig(source, policy, costs=costs)
    try:
        rig.start()
        (outcome,) = rig.outcomes({"one": tiny.spec(height=64, width=64, frames=9, steps=3)})
    finally:
        rig.close()
    assert outcome.status is Status.DONE, outcome.reason
    (devices,) = (segment.devices for segment in outcome.segments if segment.stage == DECODE)
    assert len(devices) == (2 if gain > 1.5 else 1)
