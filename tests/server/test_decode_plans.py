"""Decodes for which no device has the memory are refused before they run, by plans that are made seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from threading import Event

import httpx
import pytest
from torch import nn

import tiny
from fake_engine import VIDEOS, FakeEngine, serving
from tilework.core.model import DecodeMemory, ModelInfo, ModelSource
from tilework.core.request import Shape
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.clips.plan import decode_memory, planned_bytes
from tilework.pipelines.loading import load
from tilework.server.calls.decode_plans import DecodePlans, planned_elsewhere
from tilework.server.calls.errors import InvalidValue
from tilework.worker.models.describe import described
from waiting import PATIENCE_S, until
from zoo.autoencoders import kl_wan

MEMORY = DecodeMemory(
    autoencoder="AutoencoderKLWan", config="{}", tiling=(), dtype="float32", most_bytes=1000, counts_kernels=True
)
SHARED = tuple(replace(one, degrees=None) if one.name == "decode" else one for one in VIDEOS.stages)
INFO = replace(VIDEOS, decode=MEMORY)


@dataclass
class Plans:
    """A decode takes a byte for each pixel, on each device its share."""

    plans: list[Shape] = field(default_factory=list)
    fails: bool = False
    may_answer: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def __call__(self, memory: DecodeMemory, shape: Shape, degree: int) -> int:
        self.plans.append(shape)
        assert self.may_answer.wait(PATIENCE_S)
        if self.fails:
            raise OSError("no process")
        return shape.pixels // degree


def ask(plans: DecodePlans, info: ModelInfo, *shapes: Shape, exact: bool = False) -> list[bool]:
    """Whether each of these is refused."""

    async def refused(shape: Shape) -> bool:
        spec = tiny.spec(height=shape.height, width=shape.width, frames=shape.frames, exact=exact)
        try:
            await plans.check(info, spec)
        except InvalidValue:
            return True
        return False

    async def all_of_them() -> list[bool]:
        return [await refused(shape) for shape in shapes]

    return asyncio.run(all_of_them())


def test_what_is_within_a_plan_needs_none() -> None:
    plan = Plans()
    plans = DecodePlans(lambda _: 1, plan)
    large, small = Shape(20, 10, 5), Shape(10, 10, 5)
    assert ask(plans, INFO, large, small, large) == [False] * 3
    assert plan.plans == [large]
    too_large, larger = Shape(20, 11, 5), Shape(21, 11, 9)
    assert ask(plans, INFO, too_large, larger, too_large, small) == [True, True, True, False]
    assert plan.plans == [large, too_large]
    assert ask(plans, INFO, Shape(5, 40, 5)) == [False], "no larger, no smaller"
    assert plan.plans == [large, too_large, Shape(5, 40, 5)]


def test_requests_that_come_together_wait_for_one_plan() -> None:
    plan = Plans()
    plans, spec = DecodePlans(lambda _: 1, plan), tiny.spec(height=10, width=10, frames=5)

    plan.may_answer.clear()

    async def both() -> list[bool]:
        checks = [asyncio.create_task(plans.check(INFO, spec)) for _ in range(2)]
        await until(lambda: plan.plans and plans._lock._waiters)
        plan.may_answer.set()
        return await asyncio.gather(*checks)

    assert asyncio.run(both()) == [True, True]
    assert len(plan.plans) == 1


def test_several_devices_have_the_memory_of_several() -> None:
    too_large, shared = Shape(20, 20, 5), replace(INFO, stages=SHARED, max_degree=2)
    for num_devices, info, exact, expected in (
        (2, INFO, False, True),
        (1, shared, False, True),
        (2, shared, False, False),
        (2, shared, True, True),
        (8, replace(shared, max_degree=1), False, True),
    ):
        assert ask(DecodePlans(lambda _, count=num_devices: count, Plans()), info, too_large, exact=exact) == [expected]


def test_a_plan_that_fails_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(DecodePlans(lambda _: 1, Plans(fails=True)), INFO, Shape(900, 900, 9)) == [False]
    assert "cannot be predicted" in caplog.text
    assert ask(DecodePlans(lambda _: 1, Plans()), VIDEOS, Shape(900, 900, 9)) == [False], "nothing is known of it"


@pytest.mark.slow
@pytest.mark.parametrize("in_tiles", [False, True])
def test_a_plan_is_that_of_the_autoencoder(in_tiles: bool) -> None:
    vae = kl_wan().eval()
    if in_tiles:
        vae.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32)
        vae.enable_tiling(tile_sample_stride_height=24, tile_sample_stride_width=24)
    memory = decode_memory(vae, 10**6)
    assert memory is not None
    assert (memory.in_tiles, memory.counts_kernels) == (in_tiles, True)
    whole = planned_bytes(memory, Shape(48, 64, 9), 1)
    assert whole == decode_bytes(vae, 9, 48, 64)
    shared = planned_bytes(memory, Shape(48, 64, 9), 2)
    assert shared == whole if in_tiles else 0.4 * whole < shared < 0.6 * whole
    least = planned_bytes(replace(memory, counts_kernels=False), Shape(48, 64, 9), 1)
    assert 0.1 * whole < least < 0.7 * whole
    assert decode_memory(nn.Identity(), 1) is None


def test_a_worker_says_what_its_decodes_may_take() -> None:
    tiny.prepare()
    source = ModelSource(path="shapes-motion")
    made = load(source)
    assert described(made, source, {}, {}, {}).info.decode is None, "nothing bounds it"
    bounded = described(made, replace(source, memory_bytes=10**7), {}, {}, {}).info.decode
    assert bounded is not None
    assert (bounded.autoencoder, bounded.most_bytes, bounded.dtype) == ("AutoencoderKLWan", 10**7, "float32")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A server that has the memory for nine frames of 64 x 48."""
    memory = decode_memory(kl_wan().eval(), 0)
    assert memory is not None
    needed = planned_elsewhere(memory, Shape(48, 64, 9), 1)
    assert needed == planned_bytes(memory, Shape(48, 64, 9), 1)
    engine = FakeEngine(info=replace(VIDEOS, decode=replace(memory, most_bytes=needed)))
    with serving(engine, drain_s=0) as served:
        yield served.http


@pytest.mark.slow
def test_a_call_is_refused_with_field_value_and_remedy(client: httpx.Client) -> None:
    body = {"prompt": "a fox", "size": "64x48", "num_frames": 9}
    assert client.post("/v1/videos", json=body).status_code == 200
    answer = client.post("/v1/videos", json={**body, "size": "96x96"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "size"
    for part in ('"96x96"', "GB are available", "smaller", "num_frames", "--vae-tiling"):
        assert part in error["message"]
