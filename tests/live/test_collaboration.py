"""Collaborative stages, declared memory and LoRAs of workflows, on real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

import tilework
import tiny
from builders import Idle
from live.test_workflows import costs_of
from loras import save_lora, use_stock
from runtime.rig import Rig, assert_nothing_is_left
from tilework.control.log import replay
from tilework.core.component import num_bytes
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.core.work import Plan, Start
from tilework.cost.table import merged
from tilework.pipelines.loading import load
from tilework.pipelines.workflow.source import read_workflow
from tilework.policy import registry
from tilework.runtime.ticket import Outcome, Ticket
from tilework.worker.models.weights import KeptWeights
from waiting import until

pytestmark = pytest.mark.slow
FLOW = """
import os
import pathlib
import signal

import numpy
import torch
from PIL import Image

import tilework


def below(strips):
    return Image.fromarray(numpy.concatenate([numpy.asarray(one) for one in strips]))


@tilework.stage(mode="collaborative", parts=3, merge=below, memory=MEMORY)
class enlarged:
    def __init__(self):
        torch.manual_seed(1)
        self.net = torch.nn.Conv2d(3, 3, 3, padding=1)

    def __call__(self, picture, prompt, part, parts):
        if prompt == "fail" and part == 1:
            raise RuntimeError("out of paint")
        lost = pathlib.Path(__file__).with_name("lost")
        if "lost" in prompt and part == 1 and not lost.exists():
            lost.write_text(f"{os.getpid()}")
            signal.pause()  # For its end.
        pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float() / 255
        large = torch.nn.functional.interpolate(pixels[None], scale_factor=2, mode="nearest")
        rows = self.net(large)[0].sigmoid() * 255
        first, last = part * rows.shape[1] // parts, (part + 1) * rows.shape[1] // parts
        return Image.fromarray(rows[:, first:last].permute(1, 2, 0).to(torch.uint8).numpy())


flow = tilework.Workflow("flow", tilework.Pipeline("shapes"), enlarged)
"""
STAGE = "enlarged"
MEMORY = 3_000_000


@dataclass(frozen=True)
class EnlargeWide(Idle):
    """One request at a time: enlarges on all devices that are up, all else on the first of them."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        up = tuple(device.device_id for device in view.devices)
        if any(device.works for device in view.devices) or not up:
            return Plan()
        for job in view.waiting():
            if job.left.stage is not None:
                devices = up if job.left.stage.name == STAGE else up[:1]
                start = Start(stage=job.left.stage, job_ids=(job.job_id,), devices=devices, num_steps=1, why="wide")
                return Plan(starts=(start,))
        return Plan()


@dataclass(frozen=True)
class Place:
    """The workflow, with a LoRA of its pipeline, and the bytes of all its weights."""

    source: ModelSource
    lora: Path
    weights_bytes: int


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    tiny.prepare()
    folder = tmp_path_factory.mktemp("flow")
    (folder / "flow.py").write_text(FLOW.replace("MEMORY", str(MEMORY)))
    ink = save_lora(tilework.reference("shapes"), folder / "ink.safetensors", 3, text_encoder=True)
    source = ModelSource(path=f"{folder}/flow.py:flow", loras=(LoraSource("ink", str(ink)),))
    family = load(source)
    components = {KeptWeights.of(module).component for module in family.modules.values()}
    return Place(source, ink, num_bytes(components))


def rig_of(place: Place, policy: str, weights_bytes: int | None = None) -> Rig:
    rig = Rig((place.source,), policy, costs=merged([costs_of(place.source.path)]), weights_bytes=weights_bytes)
    rig.start()
    return rig


@pytest.fixture(scope="module")
def wide(place: Place) -> Iterator[Rig]:
    registry._GIVEN["enlarge-wide"] = EnlargeWide
    rig = rig_of(place, "enlarge-wide")
    yield rig
    rig.close()
    del registry._GIVEN["enlarge-wide"]


def expected(place: Place, spec: Spec) -> np.ndarray:
    """The stock pipeline, with the LoRAs of the request, and the parts of the stage one after another."""
    stock = tilework.reference("shapes")
    if spec.loras:
        use_stock(stock, {"ink": place.lora}, {one.name: one.scale for one in spec.loras})
    picture = Picture.fromarray(tiny.run_stock(stock, spec, max_sequence_length=0).pixels)
    (function,) = read_workflow(place.source.path).functions
    enlarge, merge = function.make(), function.settings.merge
    assert merge is not None
    return np.asarray(merge([enlarge(picture, spec.prompt, part, 3) for part in range(3)]))


def assert_drawn(place: Place, outcome: Outcome, spec: Spec, degree: int) -> None:
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    assert np.array_equal(tiny.pixels(outcome.image), expected(place, spec))
    assert max(len(segment.devices) for segment in outcome.segments if segment.stage == STAGE) == degree


def test_several_devices_work_on_one_request_and_its_picture_is_that_of_one(place: Place, wide: Rig) -> None:
    specs = {f"wide{seed}": tiny.spec(height=64, width=96, seed=seed, steps=2) for seed in range(2)}
    for outcome in wide.outcomes(specs):
        assert_drawn(place, outcome, specs[outcome.uid], degree=2)
    alone = tiny.spec(seed=9, steps=2)
    narrow = rig_of(place, "edf")
    try:
        assert_drawn(place, narrow.outcomes({"alone": alone})[0], alone, degree=1)
    finally:
        narrow.close()
    assert replay(wide.log.getvalue().splitlines())[1] is None


def test_the_default_policy_gives_it_the_devices_that_make_it_end_first(place: Place) -> None:
    rig, spec = rig_of(place, "tilework"), tiny.spec(seed=2, steps=2)
    try:
        assert_drawn(place, rig.outcomes({"one": spec})[0], spec, degree=2)
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()


def test_an_error_in_one_part_fails_the_request_with_the_name_of_the_stage(place: Place, wide: Rig) -> None:
    specs = {"bad": tiny.spec(prompt="fail", steps=2), "good": tiny.spec(steps=2)}
    bad, good = wide.outcomes(specs)
    assert (bad.status, good.status) == (Status.FAILED, Status.DONE)
    assert "stage 'enlarged' raises RuntimeError: out of paint" in bad.reason
    wide.wait_until_idle()
    assert_nothing_is_left(wide.engine)


def test_a_member_that_is_lost_costs_its_request_that_stage(place: Place, wide: Rig) -> None:
    spec = tiny.spec(prompt="a lost red circle", steps=2)
    lost = Path(place.source.path).with_name("lost")

    async def scenario() -> Outcome:
        ticket = wide.submit(spec, "lost")
        assert isinstance(ticket, Ticket)
        await until(lambda: lost.exists() and lost.read_text())
        os.kill(int(lost.read_text()), signal.SIGKILL)
        return await ticket.outcome

    outcome = wide.run(scenario())
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    assert np.array_equal(tiny.pixels(outcome.image), expected(place, spec))
    assert_nothing_is_left(wide.engine)
    wide.run(until(lambda: wide.engine.status.health().num_devices_up == 2))  # What comes next is of both.


def test_requests_use_loras_of_the_pipeline(place: Place, wide: Rig) -> None:
    plain = tiny.spec(seed=4, steps=2)
    specs = {"plain": plain, "ink": replace(plain, loras=(UsedLora("ink", 0.8),)), "again": plain}
    pictures = []
    for outcome in wide.outcomes(specs):
        assert_drawn(place, outcome, specs[outcome.uid], degree=2)
        assert outcome.image is not None
        pictures.append(bytes(outcome.image.pixels))
    assert pictures[0] == pictures[2] != pictures[1]


def test_weights_make_room_for_the_memory_that_a_stage_declares(place: Place) -> None:
    """Beside all weights there is room for a byte less than it declares."""
    total = place.weights_bytes + MEMORY - 1
    rig, spec = rig_of(place, "edf", weights_bytes=total), tiny.spec(steps=2)
    try:
        (outcome,) = rig.outcomes({"one": spec})
        assert_drawn(place, outcome, spec, degree=1)
        ((device_id,),) = {one.devices for one in outcome.segments if one.stage == STAGE}
        device = rig.engine._controller.tracker.devices[device_id]
        assert 0 < num_bytes(device.memory.components) <= total - MEMORY
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()
