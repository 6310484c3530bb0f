"""Generic models on real workers: requests take turns, move, share devices and lose a worker; pictures stay the same.

One policy for all of it: each request makes one step at a time, exact ones on another device each time, the others on
one device, on both, on the other, and on both again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import Idle, table
from processes import stands_still
from runtime.rig import Rig, assert_nothing_is_left
from stages import DIFFUSE
from tilework.control.log import replay
from tilework.core.actions import RunWork
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.core.work import Group, Plan, Start, Work
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.policy import registry
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until
from zoo import requests
from zoo.model import ZooModel
from zoo.parts import vision_processor
from zoo.qwen import qwen_edit
from zoo.registry import ZOO, build, quiet

QUICK = "z-image"
MEASURED = "flux2-klein"  # The engine measures what it costs, as a server does.
# Two heads, so that two devices can share it.
EDIT = replace(ZOO["qwen-image-edit"], components=lambda: qwen_edit({"num_attention_heads": 2}))
OTHERS = ("wan22", "flux2-klein", "hunyuan-video15", "sana-sprint-four", "modular-wan22")
MODELS = (ZOO[QUICK], EDIT, *(ZOO[name] for name in OTHERS))
STEPS = 7
ROUTE: tuple[Group, ...] = ((0,), (0, 1), (1,), (0, 1))
LEVELS = 1  # Of 255, for a picture that a group shared: 1e-5 of the latents' largest value is less than half of one.


@dataclass(frozen=True)
class Turns(Idle):
    """One step at a time: see above. The request that is the least far goes first, and devices that it waits for are
    held for it. One goes on with what devices are left of a group.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        idle = {device.device_id for device in view.devices if not device.works}
        starts: list[Start] = []
        for job in sorted(view.waiting(), key=lambda job: (job.left.num_steps_done, job.job_id)):
            group = _group(job, {device.device_id for device in view.devices})
            may_start = job.left.stage is not None and group and idle.issuperset(group)
            idle -= set(group)
            if job.left.stage is not None and may_start:
                starts.append(
                    Start(stage=job.left.stage, job_ids=(job.job_id,), devices=group, num_steps=1, why="its turn")
                )
        return Plan(starts=tuple(starts))


def _group(job: JobView, up: set[int]) -> Group:
    if job.left.stage is not None and job.left.stage.name == DIFFUSE and not job.request.exact:
        wanted = ROUTE[job.left.num_steps_done % len(ROUTE)]
    else:
        wanted = tuple({0, 1} - set(job.last_devices))[:1] or (0,)
    return tuple(device_id for device_id in wanted if device_id in up) or tuple(sorted(up))[:1]


class WithProcessor(StockPipeline):
    """For a pipeline whose processor cannot be loaded without torchvision (`zoo.parts.vision_processor`)."""

    def __init__(self, pipeline: Any, *args: Any) -> None:
        pipeline.register_modules(processor=vision_processor("Qwen2VLProcessor"))
        super().__init__(pipeline, *args)


@dataclass(frozen=True)
class Served:
    """A model on two workers, and its stock pipeline."""

    model: ZooModel
    rig: Rig
    stock: Any

    def asked(self, seed: int, **inputs: Any) -> ZooModel:
        return replace(self.model, inputs={**self.model.inputs, "num_inference_steps": STEPS, **inputs})

    def specs(self, prefix: str) -> dict[str, tuple[Spec, np.ndarray]]:
        """Requests that are exact or not, by uid, each with the stock pipeline's picture."""
        family = StockPipeline(build(self.model), self.model.name, {}, "")
        found = {}
        for seed, exact in enumerate((True, False, True, False)):
            asked = self.asked(seed, num_inference_steps=STEPS + seed % 3)
            spec = replace(requests.spec_of(asked, family, seed), exact=exact)
            found[f"{prefix}{seed}"] = spec, requests.stock_pixels(asked, self.stock, seed)
        return found


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """The policy of these tests, for these tests only."""
    registry._GIVEN["turns"] = Turns
    yield
    del registry._GIVEN["turns"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, id=model.name, marks=[] if model.name == QUICK else pytest.mark.exhaustive)
        for model in MODELS
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny.prepare()
    model: ZooModel = request.param
    directory = tmp_path_factory.mktemp(model.name)
    pipeline = build(model)
    if not model.loads:
        pipeline.register_modules(processor=None)
    pipeline.save_pretrained(str(directory), safe_serialization=True)
    tiny.write_defaults(directory, **{side: model.inputs.get(side, 64) for side in ("height", "width")})
    adapter = None if model.loads else f"{__name__}:{WithProcessor.__name__}"
    costs = None if model.name == MEASURED else table(degrees=(1, 2), pipeline=directory.name)
    rig = Rig(ModelSource(path=str(directory), adapter=adapter), "turns", costs=costs)
    try:
        rig.start()
        stock = tilework.reference(str(directory)) if model.loads else build(model)
        quiet(stock)
        yield Served(model, rig, stock)
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("victim", "is_shared"), [(0, True), pytest.param(1, False, marks=pytest.mark.exhaustive)], ids=["shared", "alone"]
)
def test_pictures_stay_the_stock_pipelines_when_a_worker_is_killed_in_the_loop(
    served: Served, victim: int, is_shared: bool
) -> None:
    rig, asked = served.rig, served.specs("shared" if is_shared else "alone")

    async def scenario() -> tuple[list[Ticket], Work]:
        tickets = [rig.submit(spec, uid) for uid, (spec, _) in asked.items()]
        assert all(isinstance(ticket, Ticket) for ticket in tickets)
        lost = await kill_in_a_step(rig, victim, num_devices=2 if is_shared else 1)
        for ticket in tickets:
            await ticket.outcome
        await until(lambda: rig.engine.status.health().num_devices_up == 2)
        return tickets, lost

    before = len(rig.log.getvalue())
    tickets, lost = rig.run(scenario())
    outcomes = [ticket.outcome.result() for ticket in tickets]
    assert_pictures(outcomes, asked)
    assert_resumed(tickets, lost, victim)
    assert_each_ended_once(rig.log.getvalue()[before:].splitlines(), len(tickets))
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


async def kill_in_a_step(rig: Rig, victim: int, num_devices: int) -> Work:
    """Kill a worker while it makes a step in the middle, on so many devices; returns what it ran."""
    pid = rig.executor.pids.get(str(victim))
    assert pid is not None
    tracker = rig.engine._controller.tracker

    def running() -> list[Work]:
        (device,) = (device for device in tracker.devices if device.device_id == victim)
        return [
            work
            for work in device.works[:1]
            if work.stage.name == DIFFUSE
            and work.members[0].first_step >= STEPS // 2
            and len(work.devices) == num_devices
        ]

    while True:
        await until(lambda: bool(running()))
        os.kill(pid, signal.SIGSTOP)
        (seen,) = running()
        await until(lambda: stands_still(pid))
        await asyncio.sleep(0)  # The loop reads the report of a step that has ended just now,
        await asyncio.sleep(0)  # and takes it.
        if seen in running():
            os.kill(pid, signal.SIGKILL)
            return seen
        os.kill(pid, signal.SIGCONT)


def assert_pictures(outcomes: list[Outcome], asked: Mapping[str, tuple[Spec, np.ndarray]]) -> None:
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        spec, stock = asked[outcome.uid]
        pixels = np.frombuffer(outcome.image.pixels, np.uint8)
        steps = [segment for segment in outcome.segments if segment.stage == DIFFUSE]
        assert sum(segment.num_steps for segment in steps) == spec.steps
        if spec.exact:
            assert np.array_equal(pixels, stock), f"{outcome.uid} differs"
            assert any(first.devices != second.devices for first, second in pairwise(steps)), "it moved"
        else:
            assert np.abs(pixels.astype(int) - stock).max() <= LEVELS, f"{outcome.uid} differs"
            assert max(len(segment.devices) for segment in steps) == 2, "it was shared"


def assert_resumed(tickets: list[Ticket], lost: Work, victim: int) -> None:
    """The interrupted step was made again, elsewhere, by the next attempt; none before it was."""
    (works,) = (found for ticket in tickets if lost in (found := _works(ticket)))
    after = works[works.index(lost) + 1]
    assert after.members[0].first_step == lost.members[0].first_step, "it began from the start again"
    assert after.members[0].attempt == lost.members[0].attempt + 1
    assert victim not in after.devices


def _works(ticket: Ticket) -> list[Work]:
    return [action.work for _, action in ticket.history if isinstance(action, RunWork)]


def assert_each_ended_once(log: list[str], num_requests: int) -> None:
    actions = [action for line in log for action in json.loads(line).get("actions", ())]
    ends = Counter(action["job_id"] for action in actions if action["is"] == "Finish")
    assert list(ends.values()) == [1] * num_requests
